"""Wrong arguments and calls of a host raise errors that name the argument before any damage."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from test_runner import INPUTS, rows, runner

from graphrt import (
    Batch,
    BatchDescriptor,
    GraphDispatcher,
    GraphMode,
    GraphOptions,
    GraphPool,
    GraphRunner,
    Host,
    InputSpec,
    Plan,
    eager_break,
    errors,
)
from graphrt.core.base.errors import (
    GraphRTError,
    InvalidBatchError,
    InvalidInputError,
    InvalidOptionError,
)
from graphrt.cpu import CPUGraphWrapper

X = INPUTS["x"]


# Input specs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [None, "repeat"])
def test_an_index_input_without_a_padding_value_is_refused(pad):
    with pytest.raises(InvalidInputError, match="pad"):
        InputSpec(torch.int64, ("tokens",), pad=pad, index=True)
    assert InputSpec(torch.int64, ("tokens",), pad=0, index=True).pad_value == 0


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.int64, 2.7),
        (torch.uint8, 300),
        (torch.uint8, -1),
        (torch.int32, 2**31),
        (torch.bool, 2),
        (torch.bool, 0.5),
        (torch.int64, float("nan")),
        (torch.int64, 1j),
        (torch.float16, 70000),
        (torch.float32, 10**400),
        (torch.bfloat16, 1e39),
        (torch.float8_e4m3fn, 1000.0),
        (torch.float32, 1 + 2j),
        (torch.float32, [1]),
        (torch.float32, torch.ones(())),
        (torch.float32, "zero"),
    ],
)
def test_a_padding_value_that_the_dtype_cannot_hold_is_refused(dtype, pad):
    with pytest.raises(InvalidInputError, match="pad"):
        InputSpec(dtype, ("tokens",), pad=pad)


@pytest.mark.parametrize(
    ("dtype", "pad", "held"),
    [
        (torch.int64, 2.0, 2),
        (torch.uint64, 2**64 - 1, 2**64 - 1),
        (torch.bool, True, True),
        (torch.int32, True, 1),
        (torch.float32, float("-inf"), float("-inf")),
        (torch.complex64, 1 + 2j, 1 + 2j),
        (torch.bfloat16, 0.1, torch.tensor(0.1).bfloat16().item()),
    ],
)
def test_a_padding_value_that_the_dtype_can_hold_fills_the_padding_rows(dtype, pad, held):
    seen = []
    run = GraphRunner(
        lambda x: x.clone(),
        inputs={"x": InputSpec(dtype, ("tokens",), pad=pad)},
        outputs=("tokens",),
        host=Host(bind=lambda buffers, *_: seen.append(buffers["x"].tolist())),
        options=GraphOptions(check="off"),
        mode="FULL",
        sizes=[2],
        platform="cpu",
    )
    run.capture()
    run(x=torch.zeros(1, dtype=dtype))
    assert seen[-1] == [0, held]


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "float32"},
        {"dtype": float},
        {"dtype": torch.quint8},
        {"shape": "tokens"},
        {"shape": 4},
        {"shape": None},
        {"shape": ("tokens", -4)},
        {"shape": ("tokens", 4.5)},
        {"shape": ("tokens", True)},
        {"shape": ("tokens", None)},
        {"index": 1, "pad": 0},
        {"dtype": torch.float32, "index": True, "pad": 0},
    ],
)
def test_a_malformed_input_spec_is_refused_by_its_constructor(arguments):
    with pytest.raises(InvalidInputError, match="InputSpec"):
        InputSpec(**{"dtype": torch.int64, "shape": ("tokens", 4), **arguments})


# inputs=, outputs=, host=, forward ---------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs",
    [
        None,
        {},
        "x",
        ["x"],
        X,
        {"x": torch.float32},
        {"x": (torch.float32, ("tokens",))},
        {"x": "tokens"},
        {"x": None},
        {"x": torch.ones(1, 4)},
        {3: X},
        {"": X},
        {"a.b": X},
        {"x": X, "stage": {}},
        {"stage": {"hidden": 4}},
    ],
    ids=repr,
)
def test_a_runner_refuses_malformed_input_declarations(inputs):
    with pytest.raises(InvalidInputError, match="inputs="):
        runner(inputs=inputs)


@pytest.mark.parametrize(
    "outputs",
    [
        "tokens",
        3,
        {"tokens"},
        {},
        {"logits": "tokens"},
        {"logits": 3},
        ("tokens", 4.5),
        ("tokens", -4),
        ("tokens", True),
        (("tokens", 4), "tokens"),
        X,
        torch.ones(2),
    ],
    ids=repr,
)
def test_a_runner_refuses_malformed_output_declarations(outputs):
    with pytest.raises(InvalidOptionError, match="outputs="):
        runner(outputs=outputs)


@pytest.mark.parametrize("outputs", [["tokens", 4], (("tokens", 4), None), {"a": ("tokens",)}, ()])
def test_lists_nested_tuples_dicts_and_empty_outputs_are_accepted(outputs):
    runner(outputs=outputs)


@pytest.mark.parametrize(
    "hooks",
    [
        {"bind": 3},
        {"bind": "bind"},
        {"state": 3},
        {"state": [3]},
        {"state": torch.ones(2, 2)},
        {"state": torch.nn.Linear(2, 2)},
        {"around_capture": 3},
        {"around_capture": None},
        {"around_graph": 3},
        {"around_graph": lambda: None},
    ],
    # Without addresses, which differ from one process of tests to the next.
    ids=lambda hooks: re.sub(" at 0x[0-9a-f]+", "", repr(hooks)),
)
def test_host_refuses_hooks_and_state_of_wrong_types(hooks):
    with pytest.raises(InvalidOptionError, match=next(iter(hooks))):
        Host(**hooks)


def test_state_given_as_an_iterator_serves_two_runners():
    counter = torch.zeros(())
    host = Host(state=(each for each in [counter]))

    def forward(x):
        return x * 0 + counter.add_(1)

    for _ in range(2):
        run = runner(forward, host=host)
        run.capture()
        assert float(counter) == 0
        run.close()


@pytest.mark.parametrize("forward", [None, "forward", 3])
def test_a_forward_that_is_not_callable_is_refused(forward):
    with pytest.raises(InvalidOptionError, match="forward"):
        runner(forward)
    with pytest.raises(InvalidOptionError, match="runnable"):
        CPUGraphWrapper(forward, "FULL")


# Calls -------------------------------------------------------------------------------------------


@pytest.fixture(params=["captured", "not captured"])
def run(request):
    made = runner()
    if request.param == "captured":
        made.capture()
    return made


@pytest.mark.parametrize(
    "given",
    [torch.ones(2, 4), torch.ones(7, 4), torch.zeros(7, dtype=torch.int64), {"x": 1}, 2, (2, 2, 1)],
    ids=repr,
)
@pytest.mark.parametrize("call", ["__call__", "verify"])
def test_a_first_positional_argument_that_is_no_batch_is_refused(run, call, given):
    error, text = InvalidBatchError, "Batch"
    if isinstance(given, torch.Tensor):
        error, text = InvalidInputError, "x by name"
    with pytest.raises(error, match=text):
        getattr(run, call)(given, x=rows(2))
    if call == "__call__":
        with pytest.raises(error, match=text):
            run(given, x=rows(2), agreed=BatchDescriptor(2))
    assert torch.equal(run(x=rows(2)), rows(2, 2.0))


def without_rows() -> dict[str, torch.Tensor]:
    dense = rows(3)
    return {
        "meta": dense.to("meta"),
        "sparse": dense.to_sparse(),
        "sparse_csr": dense.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(4)] * 3),
        "mkldnn": dense.to_mkldnn(),
    }


@pytest.mark.filterwarnings("ignore:.*(nested|[Ss]parse).*")
@pytest.mark.parametrize("kind", ["meta", "sparse", "sparse_csr", "nested", "mkldnn"])
@pytest.mark.parametrize("batch", [None, Batch(3, 3, 1)], ids=repr)
@pytest.mark.parametrize("sizes", [[2, 4], [2]], ids=["padded", "too large"])
def test_meta_sparse_nested_and_mkldnn_inputs_are_refused(kind, batch, sizes):
    if kind == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without it")
    run = runner(inputs={"x": X, "y": X}, forward=lambda x, y: x + y, sizes=sizes)
    run.capture()
    with pytest.raises(InvalidInputError, match=f"'x'.*\n.*{kind.split('_')[0]}"):
        run(batch, x=without_rows()[kind], y=rows(3))
    assert torch.equal(run(batch, x=rows(3), y=rows(3)), rows(3, 2.0))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_a_fake_tensor_as_an_input_is_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    run = runner()
    run.capture()
    with FakeTensorMode():
        fake = torch.ones(3, 4)
    with pytest.raises(InvalidInputError, match="memory"):
        run(Batch(3, 3, 1), x=fake)
    # With more rows than the buffers have, too, where it could be copied.
    small = runner(sizes=[2])
    small.capture()
    with pytest.raises(InvalidInputError, match="memory"):
        small(Batch(3, 3, 1), x=fake)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(9, 4, dtype=torch.float64), "float64"),
        (torch.ones(9, 5), r"\(9, 5\)"),
        ([1], "no tensor"),
    ],
)
def test_wrong_inputs_of_a_batch_larger_than_the_buffers_are_refused(run, value, text):
    with pytest.raises(InvalidInputError, match=text):
        run(Batch(9, 9, 1), x=value)


# Shapes that are seldom --------------------------------------------------------------------------


@pytest.mark.trust
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_verify_works_on_an_output_that_is_a_column(mode, count):
    run = runner(lambda x: (x + 1)[:, 2], outputs=("tokens",), mode=mode, sizes=[1, 2, 4])
    run.capture()
    assert run.verify(x=rows(count)).tolist() == [2.0] * count


@pytest.mark.trust
@pytest.mark.parametrize("pad", [0, "repeat"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_strided_column_of_a_larger_tensor_is_accepted_as_an_input(pad, count):
    specs = {"x": InputSpec(torch.float32, ("tokens",), pad=pad)}
    run = runner(inputs=specs, outputs=("tokens",), sizes=[1, 2, 4])
    run.capture()
    column = torch.arange(40.0).reshape(10, 4)[:count, 1]
    assert torch.equal(run.verify(x=column), column + 1)


@pytest.mark.trust
@pytest.mark.parametrize("pad", [0, "repeat"])
@pytest.mark.parametrize("shape", [("tokens", 0), (0, "tokens")], ids=repr)
def test_inputs_and_outputs_with_a_dimension_of_zero_work(shape, pad):
    specs = {"x": InputSpec(torch.float32, shape, pad=pad)}
    run = runner(inputs=specs, outputs=shape)
    run.capture()
    nothing = torch.ones(3, 0) if shape[1] == 0 else torch.ones(0, 3)
    for batch in (None, Batch(3, 3, 1)):
        assert run.verify(batch, x=nothing).shape == nothing.shape


# Breaks ------------------------------------------------------------------------------------------


@pytest.mark.trust
@pytest.mark.parametrize("operator", ["aten::add", "aten::sum", "aten::index", "aten::add.Tensor"])
def test_an_operator_with_some_torchscript_only_overloads_can_be_a_break(operator):
    run = runner(
        lambda x: (x + x)[torch.tensor([0, 1])].sum(1) * 2,
        outputs=("tokens",),
        mode="PIECEWISE",
        sizes=[2],
        options=GraphOptions(breaks=(operator,)),
    )
    run.capture()
    owner = run.graphs.owners()[0]
    (entry,) = owner.entries.values()
    assert len(entry.parts) > 1
    assert run.verify(x=rows(2)).tolist() == [16.0, 16.0]


def test_a_torchscript_only_overload_cannot_be_a_break():
    options = GraphOptions(breaks=("aten::add.t",))
    run = runner(mode="PIECEWISE", options=options)
    with pytest.raises(InvalidOptionError, match=r"add\.t"):
        run.capture()


# Copies ------------------------------------------------------------------------------------------


class CopiesItself:
    """A callable with copying of its own, to which a wrapper must not forward."""

    def __call__(self, x):
        return x

    def __deepcopy__(self, memo):
        return self

    __copy__ = __reduce__ = lambda self: self


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
@pytest.mark.parametrize("what", ["runner", "wrapper", "pool", "dispatcher", "copied by itself"])
def test_copying_or_pickling_a_runner_wrapper_pool_or_dispatcher_raises(how, what):
    made: dict[str, Any] = {
        "runner": runner,
        "wrapper": lambda: CPUGraphWrapper(torch.relu, "FULL"),
        "pool": lambda: GraphPool("cpu"),
        "dispatcher": lambda: GraphDispatcher("FULL"),
        "copied by itself": lambda: CPUGraphWrapper(CopiesItself(), "FULL"),
    }
    with pytest.raises(GraphRTError, match="cannot be copied"):
        how(made[what]())


def test_deepcopy_of_a_model_that_holds_a_wrapper_raises():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model.step = CPUGraphWrapper(model[0], "FULL")
    with pytest.raises(GraphRTError):
        copy.deepcopy(model)


@pytest.mark.parametrize("device", ["no such", 1.5])
def test_a_runner_with_an_invalid_device_raises(device):
    with pytest.raises(InvalidOptionError, match="device"):
        runner(device=device, platform="cpu")


def test_eager_break_on_a_non_callable_raises():
    with pytest.raises(InvalidOptionError, match="def"):
        eager_break(3)


@pytest.mark.trust
def test_an_operator_break_inside_an_eager_break_function_works():
    @eager_break
    def middle(x):
        return x + 1

    run = runner(
        lambda x: middle(x * 2), mode="PIECEWISE", options=GraphOptions(breaks=("aten::add",))
    )
    run.capture()
    assert torch.equal(run.verify(x=rows(3)), rows(3, 3.0))


# What errors advise ------------------------------------------------------------------------------


def test_error_classes_have_the_module_name_graphrt_errors():
    with pytest.raises(errors.GraphRTError) as raised:
        GraphMode.parse("FULLY")
    assert type(raised.value).__module__ == "graphrt.errors"
    assert type(pickle.loads(pickle.dumps(raised.value))) is errors.InvalidModeError


@pytest.mark.parametrize("argument", ["strict", "bind", "size"])
def test_an_unknown_runner_argument_raises_and_lists_plan_and_host_arguments(argument):
    with pytest.raises(errors.InvalidOptionError, match=r"no such argument[^$]*sizes[^$]*Host\("):
        GraphRunner(torch.neg, inputs={"x": InputSpec(torch.int64, ("tokens",))}, **{argument: 1})


@pytest.mark.parametrize(
    ("given", "advice"),
    [("full_decode", "FULL_DECODE_ONLY"), ("FUL", "FULL"), (3, "FULL")],
)
def test_a_misspelled_mode_is_advised_the_nearest_mode(given, advice):
    with pytest.raises(errors.InvalidModeError) as raised:
        GraphMode.parse(given)
    assert raised.value.advice == f"mode={advice!r}"


def test_an_invalid_query_length_is_advised_a_number():
    with pytest.raises(errors.InvalidOptionError) as raised:
        Plan(sizes=[1], query_lens=[0])
    assert raised.value.advice == "1"


def test_a_pool_argument_of_wrong_type_raises():
    with pytest.raises(InvalidOptionError, match="'pool'"):
        runner(pool=3)


def test_a_forward_without_a_parameter_for_its_input_raises_with_the_missing_argument():
    with pytest.raises(errors.InvalidInputError, match="missing a required argument: 'y'"):
        GraphRunner(lambda y: y, sizes=[1], mode="FULL", inputs={"x": X})

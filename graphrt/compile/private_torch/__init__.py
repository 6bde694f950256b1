"""What `graphrt.compile` uses of torch that is not public, behind typed functions.

Nothing is looked up before it is needed, as importing graphrt must load no compiler. Where this
torch lacks a name, what needs it raises `MissingTorchNameError`, or does as the name's `without`
says.
"""

from graphrt.compile.private_torch.guards import (
    GuardFilter,
    Guards,
    function_modes,
    hooks_guarded,
)
from graphrt.compile.private_torch.inductor import (
    Artifact,
    SaveFormat,
    compiler_directory,
    custom_passes,
    find_cpp_compiler,
    generates_code,
    has_triton,
    inductor_compile,
    load_artifact,
    portable_settings,
)
from graphrt.compile.private_torch.names import NAMES
from graphrt.compile.private_torch.operators import (
    call_instead,
    call_of,
    held_by,
    is_registered,
    operator_names,
    overload_name,
    overloads,
    storage_identity,
    was_written,
)
from graphrt.compile.private_torch.patches import (
    Load,
    PartitionFunction,
    code_forgotten_after_tuning,
    kernels_loaded_as_tuned,
    lacks_partitions,
    library_loads,
    load_library,
    partitions_taken,
)
from graphrt.compile.private_torch.traces import (
    SideEffects,
    computed,
    expressions,
    fake_tensors,
    mark_dynamic,
    mark_unbacked,
    new_code_shown,
    side_effects,
    size_oblivious,
    torch_check,
    trace_so_far,
)

__all__ = [
    "NAMES",
    "Artifact",
    "GuardFilter",
    "Guards",
    "Load",
    "PartitionFunction",
    "SaveFormat",
    "SideEffects",
    "call_instead",
    "call_of",
    "code_forgotten_after_tuning",
    "compiler_directory",
    "computed",
    "custom_passes",
    "expressions",
    "fake_tensors",
    "find_cpp_compiler",
    "function_modes",
    "generates_code",
    "has_triton",
    "held_by",
    "hooks_guarded",
    "inductor_compile",
    "is_registered",
    "kernels_loaded_as_tuned",
    "lacks_partitions",
    "library_loads",
    "load_artifact",
    "load_library",
    "mark_dynamic",
    "mark_unbacked",
    "new_code_shown",
    "operator_names",
    "overload_name",
    "overloads",
    "partitions_taken",
    "portable_settings",
    "side_effects",
    "size_oblivious",
    "storage_identity",
    "torch_check",
    "trace_so_far",
    "was_written",
]

"""Adapters by a table of addresses, on a GPU."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.cuda


def test_adapters_that_come_and_go_by_address_are_served_by_one_graph(
    capsys: pytest.CaptureFixture[str],
):
    pytest.importorskip("triton", reason="triton is not installed")
    from examples.lora_by_address import main

    main()
    assert capsys.readouterr().out == "{'HIT': 50}\n"

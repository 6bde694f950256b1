"""The `calc_type` of `npu_multi_head_latent_attention`, without which it ignores arguments."""

from __future__ import annotations

from typing import Any

from graphrt.core.base.errors import InvalidInputError

_WANTED = {"qseqlen": "calc_type_spec", "lse": "calc_type_ring"}


def mla_options(options: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call, with the `calc_type` that reads its query lengths.

    Under another `calc_type` ATB ignores query lengths, or `lse`. Raises `InvalidInputError` for a
    call that passes one of them in vain.
    """
    if options.get("qseqlen") is not None:
        options = {"calc_type": "calc_type_spec", **options}
    calc_type = options.get("calc_type")
    for name, needed_type in _WANTED.items():
        if options.get(name) is not None and calc_type != needed_type:
            raise InvalidInputError(
                f"{name!r} would be ignored by npu_multi_head_latent_attention",
                got=calc_type,
                expected=f"calc_type={needed_type!r}",
                advice="pass that calc_type, or leave the argument out",
            )
    return options

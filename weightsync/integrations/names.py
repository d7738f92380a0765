"""Canonical checkpoint names: what is left of a parameter's name without the wrappers around its module."""

from __future__ import annotations

from collections.abc import Iterable

_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"})
_PEFT_ROOT = "base_model.model."


def canonical_names(names: Iterable[str], *, data_parallel: bool = False) -> dict[str, str]:
    """The checkpoint name of each of `names`; names that are no part of the checkpoint are left out.

    Removes activation-checkpoint, FSDP1 and `torch.compile` wrappers at any depth, and PEFT's `base_model.model.` and
    `.base_layer.`. PEFT's trained copy of a module (`modules_to_save`) takes the module's own name, and the untrained
    original is left out. Adapter weights keep their own names: they are not in the base checkpoint, so merge them into
    the base layers before publishing. `data_parallel`: also remove a leading `module.`.
    """
    found: dict[str, str] = {}
    for name in names:
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        while data_parallel and parts[0] == "module":
            parts = parts[1:]
        canonical = ".".join(parts)
        if canonical.startswith(_PEFT_ROOT):
            parts = canonical.removeprefix(_PEFT_ROOT).split(".")
            if "original_module" in parts:
                continue
            if "modules_to_save" in parts:
                at = parts.index("modules_to_save")
                parts = parts[:at] + parts[at + 2 :]  # and the adapter's name
            canonical = ".".join(part for part in parts if part != "base_layer")
        found[name] = canonical
    return found

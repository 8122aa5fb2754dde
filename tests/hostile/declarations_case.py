"""Arms beside one broken declaration, and then beside all: `declarations_case.py FOLDER MODE`, a fork for each.

FOLDER has one folder a declaration, to be put on the path. Prints one line of JSON: by folder, what the program saw.
"""

import importlib
import json
import sys
import warnings
from pathlib import Path

from environments_case import SHARED, forked


def program():
    seen = {}
    said = []
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_, **__: said.append(str(message))
    try:
        import ultra_patches

        importlib.import_module("vllm.leaf")
        seen["import"] = "ok"
        rows = {row.id: [row.state.value, row.reason] for row in ultra_patches.status()}
        seen["bad"] = rows.get("bad")
        seen["toy"] = rows["toy"][0]
        seen["ours"] = sum(name.startswith(("vllm-", "megatron-", "bridge-")) for name in rows)
    except BaseException as error:
        seen["import"] = type(error).__name__
    seen["said"] = [text for text in said if "broken" in text or "bad" in text]
    return seen


def main(folder):
    for name in SHARED.split():
        importlib.import_module(name)
    result = {}
    kinds = sorted(Path(folder).iterdir())
    for chosen in [*([kind] for kind in kinds), [kind for kind in kinds if kind.name != "interrupts"]]:
        name = chosen[0].name if len(chosen) == 1 else "all"
        result[name] = forked(0, lambda: sys.path.__setitem__(slice(0, 0), map(str, chosen)), program)
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])

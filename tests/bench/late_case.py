"""CPU seconds of arming where torch and vLLM's reload modules are loaded; JSON.

python tests/bench/late_case.py
"""

import importlib
import json
import sys
import time

import torch  # noqa: F401 # among the modules that are searched
from vllm.model_executor.model_loader.reload import layerwise

ROUNDS = 7


def look() -> float:
    """CPU seconds of looking at every binding of every module once, which tells how fast the machine is now."""
    began = time.process_time()
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            id(value)
    return time.process_time() - began


def main() -> None:
    # Of this process alone, so that others on the machine do not count.
    began = time.process_time()
    import ultra_patches
    from ultra_patches.core import overlay

    took = {"first import": [time.process_time() - began], "reload": [], "set again": [], "take off": [], "look": []}
    rows = [ultra_patches.status()]
    for _ in range(ROUNDS):
        took["look"].append(look())
        began = time.process_time()
        importlib.reload(ultra_patches)
        took["reload"].append(time.process_time() - began)
        rows.append(ultra_patches.status())
        began = time.process_time()
        overlay.disarm()
        took["take off"].append(time.process_time() - began)
        left = [name for name, value in vars(layerwise).items() if hasattr(value, "_self_ultra_patch")]
        began = time.process_time()
        importlib.reload(ultra_patches)
        took["set again"].append(time.process_time() - began)
        rows.append(ultra_patches.status())
    states = [{row.id: [row.state.value, row.rebound] for row in one} for one in rows]
    print("\n" + json.dumps({"took": took, "states": states, "left": left, "modules": len(sys.modules)}))


if __name__ == "__main__":
    main()

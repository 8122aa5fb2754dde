"""Corrections for the defects that corrupt weights between trainer and rollout; importing this package arms them.

    import ultra_patches

Every patch is set when the upstream module that holds its target is imported, and only where the installed code has the
defect. `status()` says what is in force in this process.
"""

from __future__ import annotations

from ultra_patches import received
from ultra_patches.bias.rule import check_router_biases, sync_dtype
from ultra_patches.core import overlay as _overlay
from ultra_patches.core import settings as _settings
from ultra_patches.core.guard import door as _door
from ultra_patches.core.ledger import PatchStatus
from ultra_patches.core.overlay import require, revert, status
from ultra_patches.errors import UltraPatchesError, UltraPatchesWarning

__all__ = [
    "PatchStatus",
    "UltraPatchesError",
    "UltraPatchesWarning",
    "__version__",
    "check_router_biases",
    "received",
    "require",
    "revert",
    "status",
    "sync_dtype",
]

try:
    from ultra_patches._version import __version__
except ImportError:  # a source tree that was never built or installed has no version file
    __version__ = "0+unknown"


def _arm() -> None:
    """Arm as the environment says now, and record this process where it names a run directory."""
    with _door("the file of this process in ULTRA_PATCHES_RUN_DIR", strict=False):
        folder = _settings.read(()).run_dir
        if folder is not None and not _settings.own_command():
            from ultra_patches.run_dir import writer

            writer.keep(folder)  # before arming, so that a killed process has recorded its imports
    with _door("arming the patches"):
        _overlay.arm()


_arm()

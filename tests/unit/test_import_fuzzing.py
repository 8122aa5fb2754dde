"""Orders of importing, arming, reverting, reloading and foreign patches, drawn and compared with a model of the states."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .site_dir import Site
from .stub import META

OPERATIONS = ("arm", "import", "reload", "import again", "revert", "foreign", "foreign goes")

#: Carries out each operation and says what `f` gives and what is reported of the patch.
PROGRAM = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
import ultra_patches
from ultra_patches.core import overlay
overlay.disarm()
META = {meta!r}
kept = []

def foreign():
    return "foreign"

def do(what):
    module = sys.modules.get(META)
    if what == "arm":
        overlay.arm()
    elif what == "import":
        importlib.import_module(META)
    elif what == "reload" and module:
        importlib.reload(module)
    elif what == "import again" and module:
        del sys.modules[META]
        importlib.import_module(META)
    elif what == "revert" and "toy" in overlay.entries:
        try:
            ultra_patches.revert("toy")
        except ultra_patches.UltraPatchesError:
            return "refused"
    elif what == "foreign" and module and module.f is not foreign:
        kept[:] = [module, module.f]
        module.f = foreign
    elif what == "foreign goes" and module and module.f is foreign and kept[0] is module:
        module.f = kept[1]

seen = []
for operation in {operations!r}:
    said = do(operation)
    module = sys.modules.get(META)
    states = [r.state.value for r in ultra_patches.status() if r.id == "toy"]
    seen.append([said, module.f() if module else None, states[0] if states else None])
report(seen)
"""


@dataclass
class Model:
    """What must be so: `f` is upstream's, ours or foreign, and one word says what has become of the patch."""

    armed: bool = False
    state: str = "armed"
    late: bool = False
    f: str | None = None
    #: What `foreign` has taken the place of.
    under: str = ""
    #: Whether ours was set and is still there, under foreign code or not.
    ours: bool = False

    def do(self, what: str) -> str | None:
        """Carry out one operation; gives what it says."""
        if what == "revert":
            return self._revert()
        if what == "arm":
            self.armed = True
            if self.f is not None:
                self._set(late=True)
        elif what.startswith("foreign"):
            self._foreign(comes=what == "foreign")
        elif (what == "import") is (self.f is None):
            self._executed()
        return None

    def _revert(self) -> str | None:
        if not self.armed:
            return None
        if self.ours and self.f == "foreign":
            return "refused"
        if self.ours:
            self.f, self.ours = "upstream", False
        self.state = "reverted"
        return None

    def _foreign(self, *, comes: bool) -> None:
        if comes and self.f not in (None, "foreign"):
            self.under, self.f = str(self.f), "foreign"
        elif not comes and self.f == "foreign":
            self.f = self.under

    def _executed(self) -> None:
        self.f, self.ours = "upstream", False
        if self.armed:
            self._set(late=False)

    def _set(self, *, late: bool) -> None:
        if self.state == "reverted":
            return
        if self.f == "foreign":
            # Ours goes with it: it is out of reach, and nobody is to take it for set.
            self.state, self.ours = "conflict", False
        elif self.f == "upstream":
            self.late |= late
            self.f, self.ours, self.state = "corrected", True, "applied"

    @property
    def reported(self) -> str | None:
        if not self.armed:
            return None
        if self.state == "applied":
            if self.f == "foreign":
                return "conflict"
            return "applied-late" if self.late else "applied"
        return self.state


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=12))
def test_the_states_are_those_of_the_model(site: Site, operations: list[str]) -> None:
    if not site.declared:
        site.write(META, "def f():\n    return 'upstream'\n")
        site.distribution("vllm", "0.20.0")
        site.declare("toy = declare('toy', (META, 'f'))\nknown('affected', toy)", "toy")
    model = Model()
    wanted = []
    for operation in operations:
        said = model.do(operation)
        wanted.append([said, model.f, model.reported])
    seen = site.ask(PROGRAM.format(meta=META, operations=operations))
    assert list(zip(operations, seen, strict=True)) == list(zip(operations, wanted, strict=True))

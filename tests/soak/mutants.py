"""Every wrong decoder against the vectors: ``python tests/soak/mutants.py`` names those that all vectors let pass.

The list is tests/spec/mutants.json: function -> mistake -> the vector that tells, or "equivalent: why nothing can".
``--write`` writes it anew and keeps the reasons.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import decoder_verdicts
from decoder_mutants import mutants, planted
from decoder_verdicts import DECODER, Case, passes

LIST = Path(__file__).resolve().parents[1] / "spec" / "mutants.json"
MEMORY = 8 << 30
T = time.monotonic()
EQUIVALENT = "equivalent: "


def run(scratch: Path, known: dict[str, str]) -> dict[str, str]:
    """Mutant -> the vector that tells, the known reason why none can, or "" for one that survives."""
    decoder = decoder_verdicts.load()
    cases = decoder_verdicts.cases(scratch)
    decoder_verdicts.measure(cases, decoder)
    cases.sort(key=lambda case: case.seconds)
    found: dict[str, str] = {}
    asked = [word for word in sys.argv[1:] if not word.startswith("-")]
    for mutant in mutants(DECODER.read_text("utf-8")):
        if asked and mutant.name.split(":")[0] not in asked:
            continue
        listed = known.get(mutant.name, "")
        order = sorted(cases, key=lambda case: (case.large, case.name != listed))
        if mutant.function:
            order = [case for case in order if mutant.function in case.functions]
        if listed.startswith(EQUIVALENT) or "--quick" in sys.argv:
            order = [case for case in order if not case.large]
        with planted(mutant, decoder):
            killer = next((c for c in order if not passes(c, decoder, mutant.valued, 200.0 if c.large else 20.0)), None)
        if killer is not None:
            found[mutant.name] = killer.name
            cases.remove(killer)  # what told last time is asked first: neighbours are told by the same vectors
            cases.insert(0, killer)
        else:
            found[mutant.name] = listed if listed.startswith(EQUIVALENT) else ""
        print(f"{time.monotonic() - T:7.1f} {found[mutant.name]:30.30} {mutant.name}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Run, write the list where asked, and name what survives without a reason."""
    known = json.loads(LIST.read_text()) if LIST.exists() else {}
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        found = run(Path(scratch).resolve(), known)
    if "--write" in sys.argv:
        LIST.write_text(json.dumps(found, indent=0) + "\n")
    survivors = [name for name, verdict in found.items() if not verdict]
    for name in survivors:
        print(f"survives: {name}")
    print(f"{len(found)} wrong decoders, {len(survivors)} survive without a reason, {time.monotonic() - begin:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

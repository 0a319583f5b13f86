"""Every wrong decoder against the vectors: ``python tests/soak/mutants.py`` names those that all vectors let pass.

The list is tests/spec/mutants.json: mistake -> the vector that tells, or why none does. ``--write`` writes it anew.
Names of functions as arguments: only these, and nothing is written.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from wrong_decoders import verdicts as decoder_verdicts
from wrong_decoders.mutants import mutants, planted
from wrong_decoders.reasons import reason
from wrong_decoders.verdicts import DECODER, passes

LIST = Path(__file__).resolve().parents[1] / "spec" / "mutants.json"
MEMORY = 8 << 30  # a wrong decoder may ask for any amount
SURVIVES = "survives"


def run(scratch: Path, known: dict[str, str], functions: list[str]) -> dict[str, str]:
    """Mutant -> the vector that tells, the reason why none does, or "survives"."""
    decoder = decoder_verdicts.load()
    cases = decoder_verdicts.cases(scratch)
    decoder_verdicts.measure(cases, decoder)
    cases.sort(key=lambda case: case.seconds)
    found: dict[str, str] = {}
    for mutant in mutants(DECODER.read_text("utf-8")):
        if functions and mutant.name.split(":")[0] not in functions:
            continue
        listed, why = known.get(mutant.name), reason(mutant.name)
        order = sorted(cases, key=lambda case: (case.large, case.name != listed))
        if mutant.function:
            order = [case for case in order if mutant.function in case.functions]
        if why:  # nothing is expected: the large vectors would take hours
            order = [case for case in order if not case.large]
        with planted(mutant, decoder):
            killer = next((c for c in order if not passes(c, decoder, mutant.valued)), None)
        found[mutant.name] = killer.name if killer else why or SURVIVES
        if killer:  # asked first next time: neighbours are told by the same vectors
            cases.remove(killer)
            cases.insert(0, killer)
    return found


def main() -> int:
    """Run, write the list where asked, and name what survives without a reason."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # a mutant that loses an order must lose the same one every time
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    known = json.loads(LIST.read_text()) if LIST.exists() else {}
    functions = [word for word in sys.argv[1:] if not word.startswith("-")]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        found = run(Path(scratch).resolve(), known, functions)
    if "--write" in sys.argv and not functions:
        LIST.write_text(json.dumps(found, indent=0) + "\n")
    kinds = Counter(v if v == SURVIVES else v.split(":")[0] if ": " in v else "told" for v in found.values())
    for name, verdict in found.items():
        if verdict == SURVIVES:
            sys.stdout.write(f"survives: {name}\n")
    kinds_text = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    sys.stdout.write(f"{len(found)} wrong decoders in {time.monotonic() - begin:.0f} s: {kinds_text}\n")
    return 1 if kinds[SURVIVES] else 0


if __name__ == "__main__":
    sys.exit(main())

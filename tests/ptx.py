"""Dependent launches in compiled code: whether every way through a kernel waits, and before it writes or lets go.

`faults` follows all ways through a kernel's PTX and says what is done before the wait that must not be.
"""

from __future__ import annotations

import re

WAIT, RELEASE = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_LABEL = re.compile(r"^(\$L\w+):")
_BRANCH = re.compile(r"^(@!?%p\d+\s+)?bra(?:\.uni)?\s+(\$L\w+);")
_GUARD = re.compile(r"^@!?%?\w+\s+")


def _statements(ptx: str) -> tuple[list[str], dict[str, int]]:
    """The kernel's statements and where its labels point."""
    body = ptx[ptx.index(".entry") :]
    body = body[body.index("{\n") :]
    found: list[str] = []
    labels: dict[str, int] = {}
    for line in body.splitlines()[1:]:
        text = line.split("//")[0].strip()
        if line.startswith("}"):
            break
        if label := _LABEL.match(text):
            labels[label[1]] = len(found)
        elif text:
            found.append(text)
    return found, labels


def faults(ptx: str) -> list[str]:
    """What some way through the kernel does before it waits: "ends", "releases" or "writes"; "reads" for loads.

    Raises:
        ValueError: a jump to a label that is not there.
    """
    code, labels = _statements(ptx)
    found: set[str] = set()
    seen = {0}
    ways = [0]
    while ways:
        at = ways.pop()
        if at >= len(code):
            found.add("ends")
            continue
        text, following = code[at], [at + 1]
        plain = _GUARD.sub("", text)
        if plain.startswith(WAIT):
            # Behind it all is allowed; one under a guard may not have run.
            following = [] if plain == text else following
        elif jump := _BRANCH.match(text):
            if jump[2] not in labels:
                raise ValueError(f"ptx: expected a label {jump[2]}, got none")
            following = [labels[jump[2]]] + (following if jump[1] else [])
        elif plain.startswith(("ret", "exit")):
            found.add("ends")
            following = following if plain != text else []
        elif plain.startswith(RELEASE):
            found.add("releases")
        elif re.match(r"cp\.async\.bulk\.shared::cluster\.global", plain):
            found.add("reads")
        elif re.match(r"(st|red|atom)(\.\w+)*\.global|cp\.async", plain):
            found.add("writes")
        elif re.match(r"ld(\.\w+)*\.global", plain):
            found.add("reads")
        for one in following:
            if one not in seen:
                seen.add(one)
                ways.append(one)
    return sorted(found)

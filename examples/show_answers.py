"""Print the answers in a file of results: python examples/show_answers.py results.jsonl"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH = 100


def answers(record: dict[str, Any]) -> list[str]:
    """The text of each choice, or what went wrong."""
    if record["error"] is not None:
        return [f"failed: {record['error']['message']}"]
    choices = record["response"]["body"]["choices"]
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]


def shortened(text: str) -> str:
    """One line of at most WIDTH characters."""
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def main(path: Path) -> None:
    # A record ends at a line feed and nowhere else; str.splitlines would cut at other characters too.
    for line in path.read_bytes().split(b"\n"):
        if line:
            record = json.loads(line)
            for answer in answers(record):
                print(f"{record['custom_id']:<22}{shortened(answer)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

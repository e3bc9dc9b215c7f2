"""Tables of results as files: compact JSON with four significant digits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def rounded(value: Any) -> Any:
    """Four digits of each number: runs differ by more."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value


def write_table(file: Path, results: dict[str, Any]) -> None:
    """Writes results as the tables in bench/results are."""
    text = json.dumps(rounded(results), separators=(",", ":"), ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")

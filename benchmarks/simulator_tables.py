"""Write the compact copies of published measurements that are shipped with the package.

    python benchmarks/simulator_tables.py ../shared/validation

Rows become columns with their names once; nothing else changes. Facts and their sources only. One table more,
`distca_runs.json`, was read from a public repository by hand and is in that form already.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "src" / "steelyard" / "simulate" / "tables"
DIGITS = 7


def compact(content: dict[str, Any]) -> dict[str, Any]:
    """The same source with each table as `columns` and `rows`."""
    tables = []
    for table in content["tables"]:
        columns = list(dict.fromkeys(k for point in table["points"] for k in point))
        rows = [[_short(point.get(c)) for c in columns] for point in table["points"]]
        tables.append({"title": table["title"], "columns": columns, "rows": rows})
    kept = {k: content[k] for k in ("schema", "title", "source", "verification", "notes")}
    return {**kept, "tables": tables}


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def main(folder: Path) -> None:
    TARGET.mkdir(exist_ok=True)
    for path in sorted(folder.glob("*.json")):
        content = compact(json.loads(path.read_text("utf-8")))
        lines = [f' "{k}": {json.dumps(content[k], ensure_ascii=False)},' for k in content if k != "tables"]
        tables = []
        for table in content["tables"]:
            rows = ",\n".join(
                "   " + json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in table["rows"]
            )
            tables.append(
                f'  {{"title": {json.dumps(table["title"], ensure_ascii=False)}, "columns": '
                f'{json.dumps(table["columns"])}, "rows": [\n{rows}]}}'
            )
        text = "{\n" + "\n".join(lines) + '\n "tables": [\n' + ",\n".join(tables) + "]\n}\n"
        (TARGET / path.name).write_text(text, encoding="utf-8")
        print(f"{path.name}: {len(text) / 1024:.0f} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Put a trained head among those that ship: python scripts/ship_head.py HEAD NAME"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from hvd.models.shipped import FILES, ROOT, digests, read_index


def main() -> None:
    head, name = Path(sys.argv[1]), sys.argv[2]
    fingerprint = json.loads((head / "config.json").read_text("utf-8"))["target_fingerprint"]
    folder = ROOT / name
    folder.mkdir(exist_ok=True)
    for file in (*FILES, "README.md", "training_args.json", "curve.json"):
        shutil.copyfile(head / file, folder / file)
    index = {key: entry for key, entry in read_index().items() if entry["folder"] != name}
    index[fingerprint] = {"folder": name, "files": digests(folder)}
    (ROOT / "index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()

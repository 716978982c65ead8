"""Write this rank's words and place to TEST_RECORD_DIR, or misbehave as TEST_MODE says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

rank = int(os.environ["RANK"])
folder = Path(os.environ["TEST_RECORD_DIR"])
child = None
mode = os.environ.get("TEST_MODE", "")
if mode:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
record = {
    "argv": sys.argv[1:],
    "rank": rank,
    "local_rank": int(os.environ["LOCAL_RANK"]),
    "world": int(os.environ["WORLD_SIZE"]),
    "port": os.environ["MASTER_PORT"],
    "name": __name__,
    "path": sys.path[0],
    "pids": [os.getpid(), *([child.pid] if child else [])],
}
temporary = folder / f".argv_{rank}"
temporary.write_text(json.dumps(record))
temporary.rename(folder / f"argv_{rank}.json")
# A rank that ends with an error has the others killed: not before all have written.
deadline = time.monotonic() + 30
while len(list(folder.glob("argv_*.json"))) < record["world"] and time.monotonic() < deadline:
    time.sleep(0.02)
if mode == "dies" and rank == 1:
    sys.exit(3)
if mode:
    time.sleep(600)

"""A stub of a call on a GPU: it passes, is wrong, raises, crashes or hangs, as requested."""

import json
import os
import sys
import time
from pathlib import Path

from precondattn_gpu.call import LEDGER


def main() -> None:
    what, result = sys.argv[1:]
    print(f"{what} begins", flush=True)
    print(f"{LEDGER}{json.dumps([what])}", flush=True)
    if what == "hangs":
        time.sleep(1000)
    if what == "crashes":
        os.kill(os.getpid(), 11)
    if what == "raises":
        raise RuntimeError("an illegal memory access")
    status = "wrong" if what == "wrong" else "passed"
    threads = [os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")]
    found = {"status": status, "message": "", "pid": os.getpid(), "threads": threads}
    Path(result).write_text(json.dumps(found))
    if status != "passed":
        raise SystemExit(1)


if __name__ == "__main__":
    main()

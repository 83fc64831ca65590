"""A process that runs tasks in turn, so that libraries are imported and the device set up once.

    python -m precondattn_gpu.worker

Each line of the standard input is a task: `{"module": …, "arguments": […], "output": FILE}`. The
task's output goes to the file, and its exit code to a line of the standard output.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject


def main() -> None:
    # The tasks' own output must not be mixed with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        answers.write(f"{_run(json.loads(line))}\n")


def _run(task: JsonObject) -> int:
    """Run a task; returns its exit code."""
    output = os.open(task["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    sys.argv = [task["module"], *task["arguments"]]
    try:
        import_module(task["module"]).main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # In a separate process, this would have ended the process.
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main()

"""Export a program whose operators have no layout; this needs the code at that time.

    git worktree add /tmp/before d9633dc
    cd /tmp/before && python THIS_FILE

Where each node comes from is left out, which is most of such a file.
"""

import io
import zipfile
from pathlib import Path

import torch

import precondattn as pa

SOURCES = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")


class Extended(torch.nn.Module):
    """The output of a full call, and that of more tokens after it, by its cache."""

    def forward(self, q, k, v, more_q, more_k, more_v):
        m = pa.Lucid()
        _, cache = m.extend(m.init_cache(q=q, k=k, v=v, capacity=32), q=q, k=k, v=v)
        more, _ = m.extend(cache, q=more_q, k=more_k, v=more_v)
        return m(q, k, v), more


def main():
    inputs = tuple(torch.randn(2, n, 1, 4) for n in (5, 5, 5, 3, 3, 3))
    s, t = torch.export.Dim("s", min=2, max=20), torch.export.Dim("t", min=2, max=12)
    sizes = ({1: s},) * 3 + ({1: t},) * 3
    program = torch.export.export(Extended(), inputs, dynamic_shapes=sizes)
    for node in program.graph.nodes:
        for key in SOURCES:
            node.meta.pop(key, None)
    buffer, path = io.BytesIO(), Path(__file__).with_name("exported.pt2")
    torch.export.save(program, buffer)
    with zipfile.ZipFile(buffer) as plain, zipfile.ZipFile(path, "w") as packed:
        for name in plain.namelist():
            packed.writestr(zipfile.ZipInfo(name), plain.read(name), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    main()

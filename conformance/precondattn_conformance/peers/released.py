"""Release dates of package versions, from the package index.

An installed package does not contain its date. The versions are those of the extra `ecosystem` and
of the constraints; the dates of others are unknown.
"""

from __future__ import annotations

RELEASED = {
    ("dm-haiku", "0.0.17"): "2026-07-27",
    ("equinox", "0.13.8"): "2026-05-05",
    ("fla-core", "0.6.0"): "2026-10-23",
    ("flax", "0.12.8"): "2026-07-20",
    ("jax", "0.10.2"): "2026-06-17",
    ("keras", "3.15.1"): "2026-07-29",
    ("linear-attention-transformer", "0.19.1"): "2021-09-07",
    ("local-attention", "1.11.2"): "2025-07-16",
    ("mlstm_kernels", "2.0.6"): "2026-09-14",
    ("native-sparse-attention-pytorch", "0.2.3"): "2025-08-15",
    ("nystrom-attention", "0.0.14"): "2025-03-24",
    ("onnx", "1.23.2"): "2026-10-06",
    ("performer-pytorch", "1.1.4"): "2022-02-02",
    ("timm", "1.0.31"): "2026-11-03",
    ("tokamax", "0.0.12"): "2026-03-19",
    ("torch", "2.13.0"): "2026-07-08",
    ("transformers", "5.23.0"): "2026-11-13",
    ("x-transformers", "2.31.10"): "2026-10-23",
    ("xformers", "0.0.35"): "2026-02-20",
}

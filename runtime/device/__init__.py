"""Runs steps: `ort/` with ONNX Runtime, `trt/` with TensorRT engines. `variants.py` chooses one.

`kv.py` and `memory.py` hold KV rows on the CPU, `pool.py` those on a GPU; both are the `Cache`
of decode/backend.py.
"""

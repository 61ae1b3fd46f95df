"""Runs steps: `ort/` with ONNX Runtime, `trt/` with TensorRT engines. `variants.py` chooses one.

`kv.py` holds KV rows on the CPU, `pool.py` those on a GPU; both are the `Cache`
of decode/backend.py.
"""

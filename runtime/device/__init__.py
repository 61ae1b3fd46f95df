"""Runs steps: `ort/` with ONNX Runtime, `trt/` with TensorRT engines. `variants.py` chooses one.

`kv.py` and `memory.py` hold the KV rows of ONNX Runtime, `trt/pool.py` those of engines; both are the `Cache`
of decode/backend.py.
"""

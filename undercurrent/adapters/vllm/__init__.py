"""vLLM as an engine: its activations go, step by step, from the model runner into a shared-memory ring.

`plugin` is how vLLM finds us, `runtime` what runs in its worker, `compat` the only reader of its private names,
`engine` drives it. Importing this package imports neither vLLM nor torch.
"""

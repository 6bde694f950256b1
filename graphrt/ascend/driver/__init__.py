"""torch_npu and CANN: what they say of this machine, and what their errors mean."""

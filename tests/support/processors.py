"""What the processor at hand can do."""

import pytest
import torch

needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this processor"
)
FAST_DTYPES = (torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16))  # of oneDNN's layers

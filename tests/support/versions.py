"""What only newer versions of torch can do."""

import pytest
import torch

needs_fullgraph = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="torch.compile(fullgraph=True) is promised from torch 2.13 on: older ones break the graph",
)
needs_sharding_on_the_cpu = pytest.mark.skipif(
    torch.__version__ < (2, 7), reason="fully_shard of torch 2.6 asks for the streams of a GPU"
)

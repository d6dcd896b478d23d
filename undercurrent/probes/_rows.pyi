from typing import Any

import numpy as np
import numpy.typing as npt

_Data = npt.NDArray[np.generic[Any]] | bytes

def scattered(values: list[bytes], starts: _Data, type: int, width: int, weight: _Data, sums: _Data, /) -> None: ...
def products(rows: _Data, type: int, width: int, weights: _Data, sums: _Data, /) -> None: ...

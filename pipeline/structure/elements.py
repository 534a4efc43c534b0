"""Which elements are metals, and how long bonds between elements are."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

#: Elements that form covalent bonds; bonds to others are drawn in one dictionary and not in another.
NON_METALS: Final = frozenset({1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 33, 34, 35, 52, 53})
#: Elements of which a terminal atom may leave though no dictionary marks it: N, O, F, S, Cl, Br, I.
LEAVING_ELEMENTS: Final = frozenset({7, 8, 9, 16, 17, 35, 53})
_NOBLE_GASES: Final = frozenset({2, 10, 18, 36, 54, 86})

# fmt: off
#: Å, by atomic number from 1 (Cordero et al. 2008; of carbon sp3, of the first-row metals low spin).
_RADII: Final = (
    0.31, 0.28, 1.28, 0.96, 0.84, 0.76, 0.71, 0.66, 0.57, 0.58, 1.66, 1.41, 1.21, 1.11, 1.07, 1.05,
    1.02, 1.06, 2.03, 1.76, 1.70, 1.60, 1.53, 1.39, 1.39, 1.32, 1.26, 1.24, 1.32, 1.22, 1.22, 1.20,
    1.19, 1.20, 1.20, 1.16, 2.20, 1.95, 1.90, 1.75, 1.64, 1.54, 1.47, 1.46, 1.42, 1.39, 1.45, 1.44,
    1.42, 1.39, 1.39, 1.38, 1.39, 1.40, 2.44, 2.15, 2.07, 2.04, 2.03, 2.01, 1.99, 1.98, 1.98, 1.96,
    1.94, 1.92, 1.92, 1.89, 1.90, 1.87, 1.87, 1.75, 1.70, 1.62, 1.51, 1.44, 1.41, 1.36, 1.36, 1.32,
    1.45, 1.46, 1.48, 1.40, 1.50, 1.50, 2.60, 2.21, 2.15, 2.06, 2.00, 1.96, 1.90, 1.87, 1.80, 1.69,
)
# fmt: on

#: [128] covalent radii in Å by atomic number, NaN where unknown.
COVALENT_RADII: Final[NDArray[np.float64]] = np.full(128, np.nan)
COVALENT_RADII[1 : 1 + len(_RADII)] = _RADII
COVALENT_RADII.flags.writeable = False

#: [128] whether an element is a metal, by atomic number.
IS_METAL: Final[NDArray[np.bool_]] = np.ones(128, bool)
IS_METAL[[0, *NON_METALS, *_NOBLE_GASES]] = False
IS_METAL.flags.writeable = False

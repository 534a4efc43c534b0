"""Run a script that imports alphafold3-pytorch, without the web app that the package imports with it."""

import importlib
import runpy
import sys
import sysconfig
import types
from pathlib import Path

package = types.ModuleType("alphafold3_pytorch")
package.__path__ = [str(Path(sysconfig.get_paths()["purelib"]) / "alphafold3_pytorch")]
sys.modules["alphafold3_pytorch"] = package
model = importlib.import_module("alphafold3_pytorch.alphafold3")
package.Alphafold3 = model.Alphafold3  # type: ignore[attr-defined]
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")

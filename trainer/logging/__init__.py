"""What a run says: lines on the console, a CSV file with every step, TensorBoard, a drawing of the loss."""

from megafold.trainer.logging.run_log import RunLog, SilentLog

__all__ = ["RunLog", "SilentLog"]

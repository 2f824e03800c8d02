"""Does the part of a worker or a server, from the file of its task."""

import importlib
import pathlib
import sys

from scripts.peers import task as task_lib

task = task_lib.read(pathlib.Path(sys.argv[1]))
arm = importlib.import_module(f"scripts.peers.{task.module}")
(arm.serve if task.worker == task_lib.SERVER else arm.train)(task)

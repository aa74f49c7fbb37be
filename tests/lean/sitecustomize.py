"""A torch without its compiler, for tests that start many Python processes: importing torch._dynamo takes 5 s of CPU.

DDP and the optimizers import it in every process, and use it only when they are compiled.
"""

import gc
import importlib.abc
import importlib.machinery
import sys


class Nothing:
    """Has every attribute, and does nothing if it is called."""

    def __getattr__(self, name):
        return Nothing()

    def __call__(self, *args, **named):
        return None


class WithoutCompiler(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch._dynamo, and only that."""

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "torch._dynamo" else None

    def exec_module(self, module):
        module.disable = lambda function=None, recursive=True, **named: function or (lambda decorated: decorated)
        module.is_compiling = lambda: False
        module.__getattr__ = lambda name: Nothing()


sys.meta_path.insert(0, WithoutCompiler())
gc.set_threshold(100_000, 50, 100)  # importing torch makes garbage collections in vain: a seventh of its time

"""Build from what is there, whatever an earlier build left; all else is in pyproject.toml.

setuptools packs all of `build/lib`, and deletes nothing in it: a module that was removed or
renamed since would come back in a wheel.
"""

from __future__ import annotations

import shutil

from setuptools import setup
from setuptools.command.build import build


class FreshBuild(build):
    """Forget the last build first."""

    def run(self) -> None:
        """See the class."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(cmdclass={"build": FreshBuild})

"""x"""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None: ...

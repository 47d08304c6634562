"""A TOML file of flags. A key is the name of a flag without its leading dashes: `ddp-choice = "zero3"`,
`max-steps = 40`, `no-profile = true`."""

from collections.abc import Collection, Sequence
from pathlib import Path

from ddp_lab.runtime.cli import OneLineParser, unknown_name
from ddp_lab.runtime.config import FLAGS, RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.field import flag_name


def with_config_file(arguments: Sequence[str], ignored: Collection[str] = ()) -> list[str]:
    """`arguments`, in front of them the flags of the file that `--config` names, so that `arguments` win.

    Args:
        ignored: Keys to leave out.

    Raises:
        UserError: the file cannot be read, or has a key or a value that is not a flag's.
    """
    finder = OneLineParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    found, rest = finder.parse_known_args(arguments)
    return rest if found.config is None else [*_flags_in(found.config, ignored), *rest]


def _flags_in(path: Path, ignored: Collection[str]) -> list[str]:
    import msgspec

    from ddp_lab.untrusted import settings_in

    content = settings_in(path, "--config")
    kinds = {_key(field.name): field.type for field in FLAGS}
    flags = []
    for key, value in content.items():
        if key not in kinds:
            raise UserError(f"--config {path}: {unknown_name('key', key, kinds)}")
        try:
            msgspec.convert(value, kinds[key])
        except msgspec.ValidationError as error:
            raise UserError(f"--config {path}: {key}: {error}") from error
        if key not in ignored and value is not False:
            flags.append(f"--{key}" if value is True else f"--{key}={value}")
    return flags


def to_toml(config: RunConfig, comment: str) -> str:
    """A file for `--config` with all settings of a run, without those that are None."""
    import tomli_w

    content = {_key(name): value for name, value in config.as_dict().items() if value is not None}
    return f"# {comment}\n{tomli_w.dumps(content)}"


def _key(field_name: str) -> str:
    return flag_name(field_name).removeprefix("--")

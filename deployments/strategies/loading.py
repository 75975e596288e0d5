"""A strategy as it is configured, with its pattern compiled and its utility imported."""

from importlib.util import find_spec

from decoding.errors import ConfigError
from deployments.configuration.ensembles import StrategyConfig
from deployments.configuration.entry_point import load_callable
from deployments.strategies.extraction import Extract, by_json_field, by_regex, whole_text
from deployments.strategies.options import StrategyOptions
from deployments.strategies.utility import chrf


def load_strategy(config: StrategyConfig, *, key: str) -> StrategyOptions:
    """Build the options of a configured strategy. key: its configuration key, for errors.

    Raises:
        ConfigError: the pattern can't be compiled, or the utility can't be loaded.
    """
    if config.kind == "mbr" and config.utility is None and find_spec("sacrebleu") is None:
        raise ConfigError(f"{key}.utility: chrF needs sacrebleu: pip install 'consort[mbr]'; or name another function")
    extract: Extract = whole_text
    if config.regex is not None:
        extract = by_regex(config.regex, key=f"{key}.regex")
    elif config.json_field is not None:
        extract = by_json_field(config.json_field)
    return StrategyOptions(
        kind=config.kind,
        candidates=config.candidates,
        judge=config.judge,
        extract=extract,
        utility=chrf if config.utility is None else load_callable(config.utility, key=f"{key}.utility"),
    )

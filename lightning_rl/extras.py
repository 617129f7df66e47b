"""What to type where an optional dependency is missing."""


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra, for an installed package and for a checkout, to end a message with.

    In a checkout the first would do only once the package is installed there.
    """
    return f"pip install 'lightning-rl[{extra}]', in a checkout pip install -c constraints.txt -e '.[{extra}]'"

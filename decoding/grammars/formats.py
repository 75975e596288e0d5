"""Regular expressions of JSON Schema's string formats, as the RFCs define them."""

_HEX = "[0-9a-fA-F]"
_H16 = f"{_HEX}{{1,4}}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_LAST_32_BITS = f"(?:{_H16}:{_H16}|{_IPV4})"


def _ipv6() -> str:
    """RFC 3986 section 3.2.2: eight groups of 16 bits, the last two also as an IPv4 address; `::` stands for zeros."""
    ends = ["", _H16, *(f"(?:{_H16}:){{{groups - 2}}}{_LAST_32_BITS}" for groups in range(2, 8))]
    shortened = "|".join(
        f"(?:{_H16}(?::{_H16}){{0,{6 - groups}}})?::{end}" if groups < 7 else f"::{end}"
        for groups, end in enumerate(ends)
    )
    return f"(?:(?:{_H16}:){{6}}{_LAST_32_BITS}|{shortened})"


# RFC 3339. Year 0000 is left out, which hardly any calendar has.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY_OF_31, _DAY_OF_30, _DAY_OF_28 = "(?:0[1-9]|[12][0-9]|3[01])", "(?:0[1-9]|[12][0-9]|30)", "(?:0[1-9]|1[0-9]|2[0-8])"
_MONTH_AND_DAY = f"(?:0[13578]|1[02])-{_DAY_OF_31}|(?:0[469]|11)-{_DAY_OF_30}|02-{_DAY_OF_28}"
_DATE = f"(?:{_YEAR}-(?:{_MONTH_AND_DAY})|{_LEAP_YEAR}-02-29)"
_HOUR, _SIXTY, _FRACTION = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]", r"(?:\.[0-9]+)?"
_LEAP_SECONDS = "|".join(  # the last second of a day in UTC, in zones of whole hours
    [f"23:59:60{_FRACTION}[zZ]"]
    + [f"{(23 + hours) % 24:02}:59:60{_FRACTION}[+]{hours:02}:00" for hours in range(24)]
    + [f"{(23 - hours) % 24:02}:59:60{_FRACTION}-{hours:02}:00" for hours in range(24)]
)
_TIME = f"(?:{_HOUR}:{_SIXTY}:{_SIXTY}{_FRACTION}(?:[zZ]|[+-]{_HOUR}:{_SIXTY})|{_LEAP_SECONDS})"


def _duration() -> str:
    """RFC 3339 appendix A: units without gaps, or weeks."""
    date = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
    time = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
    return f"P(?:{date}(?:{time})?|{time}|[0-9]+W)"


_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"


def _email() -> str:
    """RFC 5321 section 4.1.2."""
    atom = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
    quoted = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
    return rf"(?:{atom}(?:\.{atom})*|{quoted})@(?:{_HOSTNAME}|\[(?:{_IPV4}|IPv6:{_ipv6()})\])"


def _uri() -> str:
    """RFC 3986 appendix A."""
    plain = r"a-zA-Z0-9._~!$&'()*+,;=\-"  # unreserved and sub-delims
    encoded = f"%{_HEX}{{2}}"
    char = f"(?:[{plain}:@]|{encoded})"
    ip_literal = rf"\[(?:{_ipv6()}|[vV]{_HEX}+\.[{plain}:]+)\]"
    host = f"(?:{ip_literal}|(?:[{plain}]|{encoded})*)"  # a name; IPv4 addresses are names, too
    authority = f"(?:(?:[{plain}:]|{encoded})*@)?{host}(?::[0-9]*)?"
    path = f"(?://{authority}(?:/{char}*)*|/?(?:{char}+(?:/{char}*)*)?)"
    return rf"[a-zA-Z][a-zA-Z0-9+.-]*:{path}(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"


PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": _duration(),
    "email": _email(),
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": _uri(),
}
LONGEST = {"hostname": 253}  # characters; RFC 1123

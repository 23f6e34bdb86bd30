//! Values of flags and variables: durations as in Go, booleans, ranges, lists.

use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

/// What was expected instead, for the end of the sentence "expected …".
pub type Expected = String;

/// Nanoseconds of a unit.
const UNITS: [(&str, u64); 7] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// A duration as Go's `time.ParseDuration` takes it, but not negative: `500ms`, `1m30s`, `1.5s`, `0`. At most
/// 2^63 - 1 ns, Go's own limit.
///
/// # Errors
/// Anything else; a bare number with the hint that it lacks a unit.
pub fn duration(text: &str) -> Result<Duration, Expected> {
    const EXPECTED: &str = "a duration such as 500ms, 30s or 1m30s";
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("{EXPECTED}; did you mean {text:.20}s?"));
    }
    nanoseconds(text).map(Duration::from_nanos).ok_or_else(|| EXPECTED.into())
}

fn nanoseconds(text: &str) -> Option<u64> {
    let mut rest = text;
    let mut total = 0_u64;
    while !rest.is_empty() || text.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(end);
        let end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        let (_, scale) = UNITS.iter().find(|(name, _)| *name == unit)?;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
            return None;
        }
        let whole = if whole.is_empty() { 0 } else { whole.parse::<u64>().ok()? };
        total = total.checked_add(whole.checked_mul(*scale)?)?.checked_add(fraction_of(fraction, *scale)?)?;
        rest = tail;
    }
    (total <= i64::MAX.unsigned_abs()).then_some(total)
}

/// `0.fraction` of a unit, rounded down; digits past the 18th are worth less than a nanosecond of an hour.
fn fraction_of(fraction: &str, scale: u64) -> Option<u64> {
    let mut value = 0_u128;
    let mut divisor = 1_u128;
    for digit in fraction.bytes().take(18) {
        value = value.checked_mul(10)?.checked_add(u128::from(digit.checked_sub(b'0')?))?;
        divisor = divisor.checked_mul(10)?;
    }
    u64::try_from(value.checked_mul(u128::from(scale))?.checked_div(divisor)?).ok()
}

/// `true`, `false`, `1` or `0`.
///
/// # Errors
/// Anything else.
pub fn boolean(text: &str) -> Result<bool, Expected> {
    match text {
        "true" | "1" => Ok(true),
        "false" | "0" => Ok(false),
        _ => Err("true, false, 1 or 0".into()),
    }
}

/// One of some words.
///
/// # Errors
/// Any other word.
pub fn word<T: Copy>(text: &str, words: &[(&str, T)]) -> Result<T, Expected> {
    let found = words.iter().find(|(name, _)| *name == text);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = words.iter().map(|(name, _)| *name).collect();
        names.join(", ")
    })
}

/// Values or ranges, separated by commas: `8080,9000-9099`.
///
/// # Errors
/// A value that is no number of the type, or a range that runs backwards.
pub fn ranges<T: FromStr + PartialOrd + Copy>(
    text: &str,
    of: &str,
) -> Result<Vec<RangeInclusive<T>>, Expected> {
    let expected = || format!("{of} or ranges of them, separated by commas, such as 1000,9000-9099");
    let number = |text: &str| {
        // FromStr would take a sign.
        text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
    };
    let range = |item: &str| {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let (first, last): (T, T) = (number(first)?, number(last)?);
        (first <= last).then_some(first..=last)
    };
    text.split(',').map(|item| range(item.trim()).ok_or_else(expected)).collect()
}

/// Names, separated by commas, none of them empty.
///
/// # Errors
/// An empty name.
pub fn names(text: &str) -> Result<Vec<String>, Expected> {
    text.split(',')
        .map(|name| match name.trim() {
            "" => Err("names separated by commas, such as envoy,pilot-agent".into()),
            name => Ok(name.to_string()),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durations_as_in_go() {
        let ms = |ms| Ok(Duration::from_millis(ms));
        for (text, expected) in [
            ("0", ms(0)),
            ("0s", ms(0)),
            ("500ms", ms(500)),
            ("30s", ms(30_000)),
            ("1m30s", ms(90_000)),
            ("1.5s", ms(1_500)),
            (".5s", ms(500)),
            ("1.s", ms(1_000)),
            ("1h", ms(3_600_000)),
            ("1500us", Ok(Duration::from_micros(1_500))),
            ("2µs", Ok(Duration::from_micros(2))),
            ("0.000000001s", Ok(Duration::from_nanos(1))),
            ("9223372036854775807ns", Ok(Duration::from_nanos(i64::MAX as u64))),
        ] {
            assert_eq!(duration(text), expected, "{text}");
        }
    }

    #[test]
    fn what_is_no_duration() {
        for text in [
            "",
            "s",
            ".s",
            "1d",
            "2w",
            "1M",
            "-5s",
            "+5s",
            "5 s",
            " 5s",
            "5s ",
            "1..5s",
            "1.5",
            "30s5",
            "s30",
            "1e3s",
            "9223372036854775808ns",
            "99999999999999999999s",
            "5124095576030432h",
            "∞",
            "5秒",
        ] {
            assert!(duration(text).is_err(), "{text}");
        }
        assert!(duration("30").unwrap_err().ends_with("did you mean 30s?"));
        assert!(duration(&"9".repeat(10_000)).unwrap_err().len() < 200);
    }

    #[test]
    fn booleans_words_and_names() {
        assert_eq!(
            [boolean("true"), boolean("1"), boolean("false"), boolean("0")],
            [Ok(true), Ok(true), Ok(false), Ok(false)]
        );
        assert!(boolean("yes").is_err() && boolean("TRUE").is_err() && boolean("").is_err());
        assert_eq!(word("b", &[("a", 1), ("b", 2)]), Ok(2));
        assert_eq!(word("c", &[("a", 1), ("b", 2)]), Err("a, b".into()));
        assert_eq!(names("envoy, pilot-agent").unwrap(), ["envoy", "pilot-agent"]);
        assert!(names("envoy,").is_err());
    }

    #[test]
    fn ranges_of_ports() {
        assert_eq!(ranges::<u16>("80,9000-9099", "ports").unwrap(), [80..=80, 9000..=9099]);
        for text in ["", "80,", "65536", "9-8", "-1", "1-", "a", "+1", "1-2-3"] {
            assert!(ranges::<u16>(text, "ports").is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_duration_comes_back(minutes in 0u64..100_000, seconds in 0u64..60, milli in 0u64..1_000) {
            let expected = Duration::from_millis((minutes * 60 + seconds) * 1_000 + milli);
            prop_assert_eq!(duration(&format!("{minutes}m{seconds}.{milli:03}s")), Ok(expected));
            prop_assert_eq!(duration(&format!("{minutes}m{seconds}s{milli}ms")), Ok(expected));
        }

        #[test]
        fn no_text_ends_the_program(text in ".{0,60}") {
            let _ = (duration(&text), boolean(&text), names(&text), ranges::<u32>(&text, "uids"));
        }
    }
}

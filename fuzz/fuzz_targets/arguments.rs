//! Arguments and environment: words separated by NUL; a word with `=` before the first empty one is a variable.
#![no_main]

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use libfuzzer_sys::fuzz_target;
use outlast::cli::{Invocation, parse};

fuzz_target!(|input: &[u8]| {
    let mut words = input.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec()));
    let variables: Vec<_> = words
        .by_ref()
        .take_while(|word| !word.is_empty())
        .filter_map(|word| {
            let word = word.into_vec();
            let at = word.iter().position(|byte| *byte == b'=')?;
            Some((OsString::from_vec(word[..at].to_vec()), OsString::from_vec(word[at + 1..].to_vec())))
        })
        .collect();
    let words: Vec<OsString> = words.collect();
    match parse(words.clone(), variables) {
        Ok(Invocation::Print(text)) => assert!(text.ends_with('\n')),
        Ok(Invocation::Run(parsed)) => {
            // What follows the dashes is COMMAND's, byte for byte.
            assert!(words.ends_with(&parsed.command_line));
            let (terms, _) = parsed.settings.terms();
            assert!(terms.min_wait <= terms.timeout);
            parsed.problems.iter().for_each(one_line);
        }
        Err(line) => one_line(&line),
    }
});

fn one_line(line: &String) {
    assert!(!line.is_empty() && !line.contains('\n') && line.len() < 2_000, "{line}");
}

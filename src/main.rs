//! The `outlast` program: parse, dispatch, map the outcome to an exit status.

// What would end PID 1, or write where a full pipe blocks it, is an error; a test may do so.
#![cfg_attr(
    not(test),
    deny(
        clippy::arithmetic_side_effects,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::panic,
        clippy::print_stderr,
        clippy::print_stdout,
        clippy::unwrap_used
    )
)]

use std::env;
use std::io::{self, Write};
use std::process::ExitCode;

use outlast::app::app;
use outlast::cli::{Command, Invocation, Parsed, parse};
use outlast::exit::Exit;
use outlast::init::first;
use outlast::install::install;
use outlast::log::{Format, Level, Log};
use outlast::poststart::poststart;
use outlast::prestop::{Pod, prestop};
use outlast::run::run;
use outlast::status::status;

/// Of the variables that mean nothing, at most so many are named.
const NAMED_VARIABLES: usize = 10;

/// The first code of the process: see [`first::before_main`].
#[used]
#[unsafe(link_section = ".init_array")]
static FIRST: extern "C" fn() = first::before_main;

fn main() -> ExitCode {
    match parse(env::args_os().skip(1), env::vars_os()) {
        Ok(Invocation::Print(text)) => {
            // Nobody is left to tell that nobody reads.
            let _ = io::stdout().write_all(text.as_bytes());
            Exit::Success
        }
        Ok(Invocation::Run(parsed)) => dispatch(*parsed),
        Err(line) => {
            Log::new(Format::Text, Level::Info).plain(&line);
            Exit::Usage
        }
    }
    .into()
}

fn dispatch(parsed: Parsed) -> Exit {
    let log = Log::new(parsed.settings.log_format, parsed.settings.log_level);
    let is_hook = matches!(parsed.command, Command::Prestop | Command::Poststart);
    let pod = is_hook.then(|| Pod::see(&parsed.settings.rules));
    if let Some(pod) = &pod {
        // A hook's own stderr is in no log. Where the container's may not be opened, it is all there is.
        let _ = log.also_to(pod.main);
    }
    for problem in &parsed.problems {
        log.plain(problem);
    }
    if !parsed.unknown.is_empty() {
        // Whoever sets a Pod's environment must not fill its log.
        let names =
            parsed.unknown.iter().take(NAMED_VARIABLES).map(String::as_str).collect::<Vec<_>>().join(",");
        log.warn("unknown variables", &[("count", &parsed.unknown.len()), ("names", &names)]);
    }
    let (terms, warnings) = parsed.settings.terms();
    for warning in warnings {
        log.warn(&warning, &[]);
    }
    match parsed.command {
        Command::Run => run(&parsed.settings, terms, parsed.command_line, &log),
        Command::Prestop => prestop(&parsed, terms, pod.and_then(|pod| pod.run), &log),
        Command::App => app(&parsed.settings, parsed.command_line, &log),
        Command::Install => install(parsed.command_line.first().map_or("".as_ref(), |path| path), &log),
        Command::Status => status(&parsed.settings, &log),
        Command::Poststart => poststart(&parsed.settings, &log),
    }
}

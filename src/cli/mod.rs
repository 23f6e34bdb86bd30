//! Arguments and environment become settings.

pub mod flags;
pub mod values;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::time::Duration;

use lexopt::Arg;

use crate::hold::Terms;
use crate::log::{Format, Level, Seconds};
use crate::pod::kernel::Source;
use crate::pod::owners::{Kinds, Rules};
use crate::proxy_api::Url;
use flags::{FLAGS, Flag};

/// What pilot-agent's own drain (5 s) and kubelet's last 2 s need of the grace period.
const RESERVE: Duration = Duration::from_secs(7);

/// A command of `outlast`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// The sidecar's entrypoint.
    Run,
    /// The sidecar's preStop hook.
    Prestop,
    /// The sidecar's postStart hook.
    Poststart,
    /// The application's entrypoint.
    App,
    /// For a person, or an exec probe.
    Status,
    /// For an init container.
    Install,
}

impl Command {
    /// All commands: name, arguments and what they do, as the help shows them.
    pub const ALL: [(Command, &'static str, &'static str, &'static str); 6] = [
        (
            Command::Run,
            "run",
            "[FLAGS] -- COMMAND [ARG...]",
            "Start COMMAND as the sidecar's entrypoint; on a stop signal hold, then forward it.",
        ),
        (Command::Prestop, "prestop", "[FLAGS]", "Hold, then return: the sidecar's preStop exec hook."),
        (
            Command::Poststart,
            "poststart",
            "[FLAGS]",
            "Return when the proxy is ready: the sidecar's postStart hook.",
        ),
        (
            Command::App,
            "app",
            "[FLAGS] -- COMMAND [ARG...]",
            "Start COMMAND as the application's entrypoint when the proxy is ready, and be seen while it lives.",
        ),
        (
            Command::Status,
            "status",
            "[FLAGS]",
            "Print every socket with its owner, and what a hold would do now.",
        ),
        (
            Command::Install,
            "install",
            "[FLAGS] PATH",
            "Copy outlast onto a shared volume, as the file PATH or into the directory PATH.",
        ),
    ];

    /// Whether a COMMAND follows `--`.
    fn takes_command(self) -> bool {
        matches!(self, Command::Run | Command::App)
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|entry| entry.0 == self).map_or("", |entry| entry.1)
    }
}

/// What to do when the proxy is not ready in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnTimeout {
    /// Exit 124.
    Fail,
    /// Go on as if it were ready.
    Continue,
}

/// When the proxy is asked to quit after COMMAND.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quit {
    /// Never.
    Never,
    /// However COMMAND ended, and also if it could not be started.
    Always,
    /// If COMMAND's status was 0.
    OnSuccess,
}

/// The settings in force.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct Settings {
    /// `--grace-period`
    pub grace_period: Duration,
    /// `--timeout`; none: by the grace period.
    pub timeout: Option<Duration>,
    /// `--min-wait`
    pub min_wait: Duration,
    /// `--settle`
    pub settle: Duration,
    /// `--poll`; none: auto.
    pub poll: Option<Duration>,
    /// `--hold`, `--proxy`, `--ignore-port`, `--ignore-uid`
    pub rules: Rules,
    /// `--source`
    pub source: Source,
    /// `--native-sidecar`
    pub native_sidecar: bool,
    /// `--drain`; none: off.
    pub drain: Option<Duration>,
    /// `--fast-exit`
    pub fast_exit: bool,
    /// `--signal-group`
    pub signal_group: bool,
    /// `--exit-zero`
    pub exit_zero: bool,
    /// `--ready-url`
    pub ready_url: Url,
    /// `--ready-timeout`
    pub ready_timeout: Duration,
    /// `--on-timeout`
    pub on_timeout: OnTimeout,
    /// `--quit`
    pub quit: Quit,
    /// `--quit-url`
    pub quit_url: Vec<Url>,
    /// `--presence`
    pub presence: bool,
    /// `--disable`
    pub disable: bool,
    /// `--json`
    pub json: bool,
    /// `--check`
    pub check: bool,
    /// `--log-format`
    pub log_format: Format,
    /// `--log-level`
    pub log_level: Level,
}

impl Default for Settings {
    /// The defaults of the flag table; a test compares them.
    fn default() -> Settings {
        Settings {
            grace_period: Duration::from_secs(30),
            timeout: None,
            min_wait: Duration::ZERO,
            settle: Duration::from_millis(200),
            poll: None,
            rules: Rules {
                hold: Kinds { listeners: true, connections: true, undelivered: true },
                proxy: vec!["envoy".into(), "pilot-agent".into()],
                ignore_ports: Vec::new(),
                ignore_uids: Vec::new(),
            },
            source: Source::Auto,
            native_sidecar: false,
            drain: None,
            fast_exit: true,
            signal_group: false,
            exit_zero: false,
            ready_url: Url::ready(),
            ready_timeout: Duration::from_secs(60),
            on_timeout: OnTimeout::Fail,
            quit: Quit::Never,
            quit_url: vec![Url::agent_quit()],
            presence: true,
            disable: false,
            json: false,
            check: false,
            log_format: Format::Text,
            log_level: Level::Info,
        }
    }
}

impl Settings {
    /// The terms of the hold, and what is worth a warning about them.
    #[must_use]
    pub fn terms(&self) -> (Terms, Vec<String>) {
        let mut warnings = Vec::new();
        let grace = self.grace_period;
        let most = grace.saturating_sub(RESERVE).max(grace.checked_div(2).unwrap_or_default());
        let timeout = self.timeout.unwrap_or(most);
        let [grace_shown, timeout_shown, reserve] = [grace, timeout, RESERVE].map(Seconds);
        if timeout > grace.saturating_sub(RESERVE) && !timeout.is_zero() {
            warnings.push(format!(
                "a timeout of {timeout_shown} leaves less than {reserve} of a grace period of {grace_shown}: the proxy may be killed while it drains"
            ));
        }
        if self.min_wait > timeout {
            warnings.push(format!(
                "min-wait {} is cut to the timeout of {timeout_shown}",
                Seconds(self.min_wait)
            ));
        }
        if self.settle > timeout && !timeout.is_zero() {
            warnings.push(format!(
                "settle {} is longer than the timeout of {timeout_shown}: no hold will be clear",
                Seconds(self.settle)
            ));
        }
        let min_wait = self.min_wait.min(timeout);
        (Terms { settle: self.settle, min_wait, timeout, poll: self.poll }, warnings)
    }
}

/// What the arguments and the environment ask for.
#[derive(Debug)]
pub enum Invocation {
    /// Print this on stdout and exit 0.
    Print(String),
    /// Run a command.
    Run(Box<Parsed>),
}

/// A command with its settings.
#[derive(Debug)]
pub struct Parsed {
    /// The command.
    pub command: Command,
    /// Its settings.
    pub settings: Settings,
    /// The flags that were given as arguments.
    pub given: Vec<&'static str>,
    /// COMMAND and its arguments, byte for byte; PATH for install.
    pub command_line: Vec<OsString>,
    /// Variables that mean nothing.
    pub unknown: Vec<String>,
    /// What is wrong: only prestop goes on all the same.
    pub problems: Vec<String>,
}

/// Parses the arguments (without the program's name) and the environment.
///
/// # Errors
/// One line for a person.
pub fn parse(
    arguments: impl IntoIterator<Item = OsString>,
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Invocation, String> {
    let mut parser = lexopt::Parser::from_args(arguments);
    // Else it would be passed over.
    if parser.try_raw_args().is_some_and(|rest| rest.peek().is_some_and(|first| first == "--")) {
        return Err(format!("outlast: --: {}", expected_commands()));
    }
    let command =
        match parser.next().map_err(|error| format!("outlast: {}", quoted(error.to_string().as_ref())))? {
            Some(Arg::Short('h') | Arg::Long("help")) => return Ok(Invocation::Print(overview())),
            Some(Arg::Short('V') | Arg::Long("version")) => return Ok(Invocation::Print(version())),
            Some(Arg::Value(name)) => {
                let found = Command::ALL.iter().find(|entry| name == entry.1);
                found
                    .map(|entry| entry.0)
                    .ok_or_else(|| format!("outlast: {}: {}", quoted(&name), expected_commands()))?
            }
            Some(argument) => return Err(format!("outlast: {}: {}", shown(&argument), expected_commands())),
            None => return Err(format!("outlast: no command: {}", expected_commands())),
        };
    let mut parsed = Parsed {
        command,
        settings: Settings::default(),
        given: Vec::new(),
        command_line: Vec::new(),
        unknown: Vec::new(),
        problems: Vec::new(),
    };
    // Flag by flag: where its value comes from, for the message, and the value. A variable is checked even where a flag
    // has the last word.
    let mut variables: BTreeMap<&str, (String, OsString)> = BTreeMap::new();
    let mut values = BTreeMap::new();
    for (name, value) in environment {
        let name = name.to_string_lossy();
        let Some(rest) = name.strip_prefix("OUTLAST_") else { continue };
        match FLAGS.iter().find(|flag| flag.variable() == name) {
            Some(flag) if !value.is_empty() && is_checked(flag, command) => {
                variables.insert(flag.name, (name.into_owned(), value));
            }
            Some(_) => {}
            // Kubernetes makes these for a Service called outlast.
            None if rest.starts_with("SERVICE_") || rest.starts_with("PORT") => {}
            None => parsed.unknown.push(format!("{name:.80}")),
        }
    }
    if let Some(print) = parsed.take_arguments(&mut parser, &mut values) {
        return Ok(Invocation::Print(print));
    }
    for flag in FLAGS {
        let mut set = |settings: &mut Settings, (source, value): &(String, OsString)| {
            let set = match value.to_str() {
                Some(text) => (flag.set)(settings, text),
                None => Err("UTF-8".into()),
            };
            if let Err(expected) = set {
                parsed.problems.push(format!("{source}: {}: expected {expected}", quoted(value)));
            }
        };
        match (variables.get(flag.name), values.get(flag.name)) {
            (Some(variable), Some(argument)) => {
                set(&mut Settings::default(), variable);
                set(&mut parsed.settings, argument);
            }
            (Some(given), None) | (None, Some(given)) => set(&mut parsed.settings, given),
            (None, None) => {}
        }
    }
    if command.takes_command() && parsed.command_line.is_empty() {
        parsed.problems.push("no COMMAND: expected -- COMMAND [ARG...] at the end".into());
    }
    if command == Command::Install && parsed.command_line.iter().all(|path| path.is_empty()) {
        parsed.problems.push("no PATH: expected a file or a directory to install to".into());
    }
    for problem in &mut parsed.problems {
        problem.insert_str(0, &format!("outlast {}: ", command.name()));
    }
    match parsed.problems.first() {
        Some(problem) if command != Command::Prestop => Err(problem.clone()),
        _ => Ok(Invocation::Run(Box::new(parsed))),
    }
}

impl Parsed {
    /// Takes flags up to `--`, and what follows it as it is. Returns what to print, if help was asked for.
    fn take_arguments(
        &mut self,
        parser: &mut lexopt::Parser,
        values: &mut BTreeMap<&str, (String, OsString)>,
    ) -> Option<String> {
        loop {
            if let Some(mut rest) = parser.try_raw_args()
                && rest.next_if(|argument| argument == "--").is_some()
            {
                self.command_line = rest.collect();
                if !self.command.takes_command() && !self.command_line.is_empty() {
                    self.problems.push("--: unexpected: the command takes no COMMAND".into());
                }
                return None;
            }
            let name = match parser.next() {
                Ok(None) => return None,
                Ok(Some(Arg::Short('h'))) => return Some(help(self.command, false)),
                Ok(Some(Arg::Long("help"))) => return Some(help(self.command, true)),
                Ok(Some(Arg::Short('V') | Arg::Long("version"))) => return Some(version()),
                Ok(Some(Arg::Long(name))) => name.to_string(),
                Ok(Some(Arg::Value(path)))
                    if self.command == Command::Install && self.command_line.is_empty() =>
                {
                    self.command_line.push(path);
                    continue;
                }
                Ok(Some(argument)) => {
                    let mut problem = format!("{}: unexpected argument", shown(&argument));
                    if self.command.takes_command() {
                        problem += ": COMMAND stands after --";
                    }
                    self.problems.push(problem);
                    continue;
                }
                Err(error) => {
                    self.problems.push(quoted(error.to_string().as_ref()));
                    continue;
                }
            };
            let Some(flag) = flags_of(self.command).find(|flag| flag.name == name) else {
                let value = parser.optional_value();
                let value = value.map(|value| format!("={}", quoted(&value))).unwrap_or_default();
                let name = shown(&Arg::Long(&name));
                self.problems.push(format!(
                    "{name}{value}: unknown flag: expected one of those in outlast {} --help",
                    self.command.name()
                ));
                continue;
            };
            let value = if flag.value.is_empty() {
                Some(parser.optional_value().unwrap_or_else(|| "true".into()))
            } else {
                parser.value().ok()
            };
            match value {
                Some(value) => {
                    values.insert(flag.name, (format!("--{}", flag.name), value));
                    self.given.push(flag.name);
                }
                None => self.problems.push(format!("--{}: no value: expected {}", flag.name, flag.value)),
            }
        }
    }
}

/// Only the settings of the command that runs are checked. poststart checks those of the hold as well, so that a typo
/// shows at the start and not at the stop.
fn is_checked(flag: &Flag, command: Command) -> bool {
    let holds = [Command::Run, Command::Prestop].iter().any(|command| flag.commands.contains(command));
    flag.commands.contains(&command) || (command == Command::Poststart && holds)
}

fn flags_of(command: Command) -> impl Iterator<Item = &'static Flag> {
    FLAGS.iter().filter(move |flag| flag.commands.contains(&command))
}

/// A value as it stands in a message: quoted, on one line, not endless.
fn quoted(value: &OsStr) -> String {
    const MOST: usize = 80;
    let text = value.to_string_lossy();
    let cut: String = text.chars().take(MOST).collect();
    if cut.len() < text.len() { format!("{cut:?}...") } else { format!("{cut:?}") }
}

fn shown(argument: &Arg) -> String {
    match argument {
        Arg::Short(letter) => format!("-{}", letter.escape_debug()),
        Arg::Long(name) => format!("--{}", name.chars().take(80).collect::<String>().escape_debug()),
        Arg::Value(value) => quoted(value),
    }
}

fn version() -> String {
    concat!("outlast ", env!("CARGO_PKG_VERSION"), "\n").into()
}

fn expected_commands() -> String {
    let names: Vec<_> = Command::ALL.iter().map(|entry| entry.1).collect();
    format!("expected a command: {}; outlast --help tells more", names.join(", "))
}

fn overview() -> String {
    let mut text = version();
    text += "Lets a sidecar proxy outlast the application it serves: on the stop signal it waits until nothing\n\
             but the proxy listens, the application's connections are over and nothing is undelivered; then it\n\
             lets the proxy stop.\n\nUsage:\n";
    for (_, name, arguments, _) in Command::ALL {
        // Writing to a String cannot fail, here and below.
        let _ = writeln!(text, "  outlast {name} {arguments}");
    }
    text += "\nCommands:\n";
    for (_, name, _, what) in Command::ALL {
        let _ = writeln!(text, "  {name:<9} {what}");
    }
    text += "\n  -h, --help      Print help; after a command, help on it.\n  -V, --version   Print the version.\n";
    text
}

fn help(command: Command, long: bool) -> String {
    let mut text = String::new();
    for (_, name, arguments, what) in Command::ALL.iter().filter(|entry| entry.0 == command) {
        let _ = writeln!(
            text,
            "outlast {name} {arguments}\n\n{what}\n\nFlags, each with its environment variable:"
        );
    }
    for flag in flags_of(command) {
        let value = if flag.value.is_empty() { String::new() } else { format!("={}", flag.value) };
        let name = format!("--{}{value}", flag.name);
        if long {
            let _ = writeln!(text, "\n  {name}\n      {} [{}]", flag.short, flag.variable());
            wrap(&mut text, "      ", flag.long);
            let _ = writeln!(text, "      Default: {}.", flag.default);
        } else {
            let _ = writeln!(text, "  {name:<27} {} [{}]", flag.short, flag.default);
        }
    }
    text +=
        "\nA flag goes before its variable (OUTLAST_ and the flag's name), which goes before the default.\n";
    let statuses = match command {
        Command::Run => {
            "COMMAND's; 128 + n when signal n killed it; 2 wrong usage; 125 outlast failed before COMMAND ran; 126 \
             COMMAND cannot be executed; 127 COMMAND was not found."
        }
        Command::Prestop => {
            "0 released; 124 the timeout was reached; 128 + n signal n ended the hold; 2 a flag or variable was wrong, \
             and the hook held with that setting's default."
        }
        Command::Poststart => {
            "0 the proxy is ready; 124 it was not in time; 128 + n signal n ended the wait; 2 a flag or variable was \
             wrong, those of the hold included."
        }
        Command::App => {
            "COMMAND's; 128 + n when signal n killed it or ended the wait for the proxy; 2 wrong usage; 124 the proxy was \
             not ready in time; 125 outlast failed before COMMAND ran; 126 COMMAND cannot be executed; 127 COMMAND was \
             not found."
        }
        Command::Install => "0; 2 wrong usage; 125 it could not be installed, and nothing is left behind.",
        Command::Status => {
            "0; with --check 0 nothing holds, 3 something holds, 4 not everything could be read; 2 wrong usage."
        }
    };
    text += "\n";
    wrap(&mut text, "", &format!("Exit status: {statuses}"));
    text
}

/// Breaks a paragraph into lines of at most 100 columns.
fn wrap(text: &mut String, indent: &str, paragraph: &str) {
    let mut line = String::new();
    for word in paragraph.split_ascii_whitespace() {
        if !line.is_empty()
            && [indent, &line, word].into_iter().map(str::len).fold(1, usize::saturating_add) > 100
        {
            let _ = writeln!(text, "{indent}{line}");
            line.clear();
        }
        let space = if line.is_empty() { "" } else { " " };
        let _ = write!(line, "{space}{word}");
    }
    let _ = writeln!(text, "{indent}{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_words(words: &[&str], environment: &[(&str, &str)]) -> Result<Invocation, String> {
        let environment: Vec<_> =
            environment.iter().map(|(k, v)| (OsString::from(k), OsString::from(v))).collect();
        parse(words.iter().map(OsString::from), environment)
    }

    fn parsed(words: &[&str], environment: &[(&str, &str)]) -> Parsed {
        match parse_words(words, environment) {
            Ok(Invocation::Run(parsed)) => *parsed,
            other => panic!("{other:?}"),
        }
    }

    fn refused(words: &[&str], environment: &[(&str, &str)]) -> String {
        let line = parse_words(words, environment).unwrap_err();
        assert!(!line.contains('\n') && line.len() < 400, "{line}");
        line
    }

    #[test]
    fn flag_then_environment_then_default() {
        let env = [("OUTLAST_TIMEOUT", "10s"), ("OUTLAST_SETTLE", ""), ("OUTLAST_EXIT_ZERO", "nonsense")];
        let settings = parsed(&["run", "--", "true"], &env).settings;
        assert_eq!(settings.timeout, Some(Duration::from_secs(10)));
        assert_eq!(settings.settle, Duration::from_millis(200), "an empty variable counts as unset");
        let settings = parsed(&["run", "--timeout=5s", "--", "true"], &env).settings;
        assert_eq!(settings.timeout, Some(Duration::from_secs(5)));
        assert_eq!(parsed(&["run", "--timeout", "5s", "--", "true"], &[]).settings.timeout, settings.timeout);
        let line = refused(&["run", "--timeout=5s", "--", "true"], &[("OUTLAST_TIMEOUT", "30")]);
        assert!(line.contains("OUTLAST_TIMEOUT"), "checked, though it has no say: {line}");
    }

    #[test]
    fn every_default_of_the_table_is_the_one_in_force() {
        let defaults = format!("{:?}", Settings::default());
        for flag in FLAGS.iter().filter(|flag| flag.name != "timeout") {
            let mut settings = Settings::default();
            (flag.set)(&mut settings, flag.default).unwrap();
            assert_eq!(format!("{settings:?}"), defaults, "{}", flag.name);
        }
        let (terms, warnings) = Settings::default().terms();
        assert_eq!((terms.timeout, warnings.len()), (Duration::from_secs(23), 0));
    }

    #[test]
    fn the_timeout_follows_the_grace_period_and_warns_of_too_little_rest() {
        let terms = |words: &[&str]| {
            let words = [&["prestop"], words].concat();
            let (terms, warnings) = parsed(&words, &[]).settings.terms();
            (terms.timeout.as_secs(), terms.min_wait.as_secs(), warnings.len())
        };
        assert_eq!(terms(&["--grace-period=60s"]), (53, 0, 0));
        assert_eq!(terms(&["--grace-period=10s"]), (5, 0, 1), "never less than half");
        assert_eq!(terms(&["--timeout=25s"]), (25, 0, 1));
        assert_eq!(terms(&["--timeout=10s", "--min-wait=15s"]), (10, 10, 1));
        assert_eq!(terms(&["--timeout=0"]), (0, 0, 0));
    }

    #[test]
    fn what_follows_the_dashes_is_not_ours() {
        let parsed = parsed(&["run", "--settle=1s", "--", "--timeout", "--", "-h", ""], &[]);
        assert_eq!(parsed.command_line, ["--timeout", "--", "-h", ""]);
    }

    #[test]
    fn bad_values_are_named_on_one_line() {
        for (words, env) in [
            (&["run", "--timeout=30", "--", "true"][..], &[][..]),
            (&["run", "--", "true"], &[("OUTLAST_TIMEOUT", "30")]),
        ] {
            let line = refused(words, env);
            assert!(line.contains("\"30\"") && line.contains("30s"), "{line}");
            assert!(line.contains("--timeout") || line.contains("OUTLAST_TIMEOUT"), "{line}");
        }
        let bad = [
            "--exit-zero",
            "--nonsense",
            "--nonsense=1",
            "--timeout",
            "--poll=0",
            "--hold=everything",
            "--hold=",
            "--proxy=",
            "--ignore-port=70000",
            "--signal-group=yes",
            "--log-format=xml",
            "-x",
            "true",
            "--grace-period=-5s",
            "--settle=1d",
            "--timeout=30\n40",
            "--=",
            "-",
        ];
        for word in bad {
            refused(&["run", word, "--", "true"], &[]);
        }
        refused(&["run", &format!("--timeout={}", "9".repeat(100_000)), "--", "true"], &[]);
        refused(&["run", &format!("--{}", "9\n".repeat(100_000)), "--", "true"], &[]);
        for words in [
            &["run"][..],
            &["run", "--"],
            &["run", "true"],
            &["--", "run", "--", "true"],
            &[],
            &["frobnicate"],
            &["--nonsense"],
            &["run", "--timeout"],
        ] {
            refused(words, &[]);
        }
    }

    #[test]
    fn prestop_names_every_bad_one_and_goes_on_with_the_default() {
        let words = [
            "prestop",
            "--timeout=30",
            "--nonsense=1",
            "stray",
            "--settle=1s",
            "--min-wait",
            "--exit-zero",
            "--",
            "x",
        ];
        let parsed = parsed(&words, &[("OUTLAST_POLL", "fast"), ("OUTLAST_TIMEOUT", "9s")]);
        let problems = parsed.problems.join("\n");
        for named in ["--timeout", "--nonsense", "stray", "OUTLAST_POLL", "--min-wait", "--: unexpected"] {
            assert!(problems.contains(named), "{named} in {problems}");
        }
        assert_eq!(parsed.settings.timeout, None);
        assert_eq!(parsed.settings.settle, Duration::from_secs(1));
    }

    #[test]
    fn unknown_variables_are_named_but_not_those_of_a_service_called_outlast() {
        let env = [
            ("OUTLAST_TIMEOUTS", "1"),
            ("OUTLAST_SERVICE_HOST", "10.0.0.1"),
            ("OUTLAST_PORT_80_TCP", "x"),
            ("OUTLAST_PORT", "x"),
            ("OUTLASTX", ""),
            ("PATH", "/bin"),
        ];
        assert_eq!(parsed(&["run", "--", "true"], &env).unknown, ["OUTLAST_TIMEOUTS"]);
    }

    #[test]
    fn poststart_checks_the_settings_of_the_hold_too() {
        assert!(refused(&["poststart"], &[("OUTLAST_SETTLE", "1")]).contains("OUTLAST_SETTLE"));
        parsed(&["run", "--", "true"], &[("OUTLAST_READY_URL", "nonsense")]);
    }

    #[test]
    fn help_and_version_work_everywhere() {
        for words in [
            &["-h"][..],
            &["--help"],
            &["-V"],
            &["--version"],
            &["run", "-h"],
            &["prestop", "--help"],
            &["run", "--timeout=x", "-V"],
        ] {
            assert!(matches!(parse_words(words, &[]), Ok(Invocation::Print(_))), "{words:?}");
        }
        for flag in FLAGS {
            for command in flag.commands {
                let long = help(*command, true);
                assert!(long.contains(&format!("--{}", flag.name)) && long.contains(&flag.variable()));
                assert!(help(*command, false).contains(flag.short));
                assert!(long.lines().all(|line| line.chars().count() <= 100), "{long}");
            }
        }
    }

    /// The README's table is this one, so that the two cannot drift.
    #[test]
    fn the_readme_has_the_table_of_flags() {
        let mut table = String::from("| flag | default | commands | meaning |\n|---|---|---|---|\n");
        for flag in FLAGS {
            let commands: Vec<_> = flag.commands.iter().map(|command| command.name()).collect();
            let value = if flag.value.is_empty() { String::new() } else { format!("={}", flag.value) };
            let (name, default, commands) = (flag.name, flag.default, commands.join(", "));
            let _ = writeln!(
                table,
                "| `--{name}{value}` | {default} | {commands} | {} {} |",
                flag.short, flag.long
            );
        }
        let readme = include_str!("../../README.md");
        let found =
            readme.split_once("<!-- settings -->\n").unwrap().1.split_once("<!-- /settings -->").unwrap().0;
        assert!(found == table, "README.md should have between its marks:\n{table}");
    }
}

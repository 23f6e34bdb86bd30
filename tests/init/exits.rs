//! The status that the container's runtime sees is COMMAND's; what cannot be run is named, with the reason.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::process::Launch;
use crate::sys::{self, libc};
use crate::table::{Init, rows};

/// An empty directory for one program's turn of one test, gone with it.
struct Scratch(PathBuf);

impl Scratch {
    fn new(test: &str, init: Init) -> Scratch {
        let path = std::env::temp_dir().join(format!("outlast-{test}-{init:?}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    fn file(&self, name: &str, content: &[u8], mode: u32) -> String {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path.to_str().unwrap().into()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The status, and what the message names: the command, one of the reasons.
fn refusal(launch: Launch, command: &str, reasons: &[&str]) -> String {
    let mut run = launch.start();
    let status = run.end();
    let text = run.stderr().to_lowercase();
    let names = text.contains(&command.to_lowercase());
    let says = reasons.iter().any(|reason| text.contains(reason));
    let words = match (names, says) {
        (true, true) => "names command and reason",
        (true, false) => "names the command",
        (false, true) => "names the reason",
        (false, false) => "names neither",
    };
    format!("{status}, {words}")
}

/// `all`, or the numbers that are not so.
fn all_but(wrong: &[String]) -> String {
    if wrong.is_empty() { "all".into() } else { format!("all but {}", wrong.join(", ")) }
}

/// The signals that end a process which does nothing about them.
fn deadly() -> impl Iterator<Item = i32> {
    use libc::{SIGCHLD, SIGCONT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG, SIGWINCH};
    let harmless = [SIGCHLD, SIGCONT, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG, SIGWINCH, SIGSTOP];
    (1..=64).filter(move |n| !harmless.contains(n))
}

rows! {
    fn every_status(init) {
        let wrong: Vec<String> = (0..256)
            .map(|status| (status, Launch::of(init).role("exit", &[&status.to_string()]).start().end()))
            .filter(|(status, end)| status.to_string() != *end)
            .map(|(status, end)| format!("{status} is {end}"))
            .collect();
        all_but(&wrong)
    }

    /// 128 + n, real-time signals included.
    fn death_by_each_signal(init) {
        let wrong: Vec<String> = deadly()
            .map(|n| {
                let launch = Launch::of(init).role("raise", &[&n.to_string()]);
                let mut run = launch.with(|| sys::set_limit(libc::RLIMIT_CORE, 0)).start();
                (n, run.end())
            })
            .filter(|(n, end)| (128 + n).to_string() != *end)
            .map(|(n, end)| format!("{} is {end}", sys::name(n)))
            .collect();
        all_but(&wrong)
    }

    /// A core dump sets a bit of its own in the status.
    fn death_with_a_core_dump(init) {
        let scratch = Scratch::new("core", init);
        let directory = sys::c(scratch.0.to_str().unwrap());
        let launch = Launch::of(init).role("raise", &["6"]).with(move || {
            // SAFETY: the path lives as long as the closure.
            sys::check(unsafe { libc::chdir(directory.as_ptr()) })?;
            sys::set_limit(libc::RLIMIT_CORE, libc::RLIM_INFINITY)
        });
        launch.start().end()
    }

    fn a_command_that_is_missing(init) {
        refusal(Launch::of(init).command(["no-such-command"]), "no-such-command", &["not found", "no such file"])
    }

    fn a_path_that_is_missing(init) {
        refusal(Launch::of(init).command(["/no/such/path"]), "/no/such/path", &["not found", "no such file"])
    }

    fn a_directory(init) {
        refusal(Launch::of(init).command(["/usr"]), "/usr", &["directory", "permission denied"])
    }

    fn a_file_that_is_not_executable(init) {
        let scratch = Scratch::new("mode", init);
        let file = scratch.file("plain-file", b"#!/bin/sh\n", 0o644);
        refusal(Launch::of(init).command([&file]), "plain-file", &["not executable", "permission denied"])
    }

    fn an_elf_of_another_architecture(init) {
        let scratch = Scratch::new("elf", init);
        let mut elf = fs::read(Init::TiniStatic.path()).unwrap();
        // e_machine: EM_PARISC, for which no machine has an emulator.
        elf[18..20].copy_from_slice(&[15, 0]);
        let file = scratch.file("foreign-elf", &elf, 0o755);
        refusal(Launch::of(init).command([&file]), "foreign-elf", &["architecture"])
    }

    fn a_file_that_is_no_program(init) {
        let scratch = Scratch::new("text", init);
        let file = scratch.file("text-file", b"exit 4\n", 0o755);
        refusal(Launch::of(init).command([&file]), "text-file", &["neither a program nor a script", "format error"])
    }

    fn a_missing_interpreter(init) {
        let scratch = Scratch::new("interpreter", init);
        let file = scratch.file("a-script", b"#!/no/such/interpreter -x\n", 0o755);
        refusal(Launch::of(init).command([&file]), "a-script", &["interpreter"])
    }

    /// The kernel puts a script's interpreter in front of the arguments: what just fitted for the init is then too long.
    fn too_long_an_argument_list(init) {
        let scratch = Scratch::new("long", init);
        let line = format!("#!/{}bin/true {}\n", "./".repeat(50), "x".repeat(100));
        let file = scratch.file("a-script", line.as_bytes(), 0o755);
        // Half a MiB of stack leaves 128 KiB to arguments and environment.
        let launch = |length: usize| {
            Launch::of(init)
                .command([file.as_str(), &"x".repeat(length)])
                .with(|| sys::set_limit(libc::RLIMIT_STACK, 512 * 1024))
        };
        let (mut fits, mut too_long) = (1_000, 131_000);
        while too_long - fits > 1 {
            let length = usize::midpoint(fits, too_long);
            if launch(length).try_start().is_ok() { fits = length } else { too_long = length }
        }
        refusal(launch(fits), "a-script", &["too long"])
    }

    /// `RLIMIT_NPROC`, as it holds for an unprivileged user.
    fn no_process_left_to_fork(init) {
        // The limit counts all processes of a user: nobody else has this one.
        let id = 1_000_000 + std::process::id() * 8 + init as u32;
        let launch = Launch::of(init).command(["true"]).with(move || {
            sys::set_limit(libc::RLIMIT_NPROC, 1)?;
            sys::become_user(id)
        });
        refusal(launch, "true", &["temporarily unavailable"])
    }

    fn no_memory_left_to_fork(init) {
        let calls = &[libc::SYS_fork, libc::SYS_vfork, libc::SYS_clone, libc::SYS_clone3];
        let launch = Launch::of(init).command(["true"]).with(|| sys::refuse(calls, libc::ENOMEM));
        refusal(launch, "true", &["out of memory", "cannot allocate memory"])
    }
}

#[test]
fn what_the_messages_say() {
    let scratch = Scratch::new("messages", Init::Outlast);
    let script = scratch.file("a script", b"#! /no/such/interpreter -x\n", 0o755);
    let plain = scratch.file("plain", b"", 0o644);
    for (command, status, reason) in [
        ("no-such-command", "127", "not found"),
        ("", "127", "not found"),
        ("/usr", "126", "is a directory"),
        (&plain, "126", "is not executable"),
        (&script, "126", "its interpreter \\\"/no/such/interpreter\\\" is missing"),
    ] {
        let mut run = Launch::of(Init::Outlast).command([command]).start();
        assert_eq!(run.end(), status);
        let text = run.stderr();
        assert!(
            text.contains("cannot run COMMAND") && text.contains(command) && text.contains(reason),
            "{text}"
        );
        assert_eq!(text.lines().count(), 1, "{text}");
    }
    assert!(Path::new(&script).exists());
}

//! COMMAND gets what a plain exec would have given it, and the init keeps nothing.

use std::collections::BTreeSet;
use std::ffi::{CString, OsString};
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;

use crate::process::{Launch, NEVER, field, mask, role, state, until, within};
use crate::sys::{self, libc};
use crate::table::{Init, rows};

/// What COMMAND wrote to a file without a name.
fn written(file: &OwnedFd) -> Vec<u8> {
    // Opened anew: the file's own position is at its end.
    fs::read(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap()
}

/// Odd on every account: what `state` in child.rs tells of itself after this.
fn odd(launch: Launch, out: &OwnedFd) -> Launch {
    // Twice the same name, none at all, no text, and what outlast itself reads.
    let environment: [&[u8]; 8] = [
        b"PATH=/usr/bin:/bin",
        b"A=1",
        b"A=2",
        b"=x",
        b"novalue",
        b"",
        b"B=\xff\xfe\n",
        b"OUTLAST_SETTLE=1s",
    ];
    let environment = environment.map(|entry| CString::new(entry).unwrap()).to_vec();
    let file = out.as_raw_fd();
    launch
        .stdout(out.try_clone().unwrap())
        .stderr(out.try_clone().unwrap())
        .raw_environment(environment)
        .with(move || {
            // SAFETY: system calls with numbers, and a path that is a constant.
            unsafe {
                for fd in [107, 109, 200, 201] {
                    sys::check(libc::dup2(file, fd))?;
                }
                sys::check(libc::chdir(c"/usr/share".as_ptr()))?;
                libc::umask(0o157);
                libc::setpriority(libc::PRIO_PROCESS, 0, 7);
                libc::prctl(libc::PR_SET_TIMERSLACK, 123_456);
                sys::check(libc::personality(0x0004_0000))?;
            }
            sys::set_limit(libc::RLIMIT_CORE, 12_345)?;
            sys::set_limit(libc::RLIMIT_NOFILE, 777)
        })
}

rows! {
    /// Everything of a process that exec hands on, with odd values.
    fn all_that_exec_gives(init) {
        let seen = |launch: Launch| {
            let out = sys::memory_file();
            let mut run = odd(launch.role("state", &["", "two words"]), &out).start();
            assert_eq!(run.end(), "0");
            let text = String::from_utf8(written(&out)).unwrap();
            // The log goes to the same file.
            text.lines().filter(|line| line.contains(": ")).map(String::from).collect::<Vec<_>>()
        };
        let (plain, under) = (seen(Launch::plain()), seen(Launch::of(init)));
        let key = |line: &String| line.split(':').next().unwrap().to_string();
        let lost: Vec<String> = plain.iter().filter(|line| !under.contains(line)).map(key).collect();
        assert!(plain.len() > 20, "{plain:?}");
        if lost.is_empty() { "as exec gives it".into() } else { format!("not {}", lost.join(", ")) }
    }

    /// One by one, all, and in mixtures: `SigBlk`, `SigIgn` and `SigCgt` beside those of a plain exec.
    fn mask_and_dispositions(init) {
        let all: u64 = u64::MAX;
        let bit = |signal: i32| 1_u64 << (signal - 1);
        let mut given: Vec<(u64, u64)> = vec![(0, 0), (all, 0), (0, all), (all, all)];
        for signal in sys::catchable() {
            given.extend([(bit(signal), 0), (0, bit(signal))]);
        }
        // A fixed sequence of mixtures (Knuth's multiplier).
        let mut mix = 1_u64;
        for _ in 0..30 {
            mix = mix.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            given.push((mix, mix.rotate_left(32)));
        }
        let mut changed = BTreeSet::new();
        for (blocked, ignored) in given {
            let seen = |launch: Launch| {
                let mut run = launch.command(["/bin/cat", "/proc/self/status"]).with(move || {
                    sys::catchable().filter(|n| ignored & 1 << (n - 1) != 0).for_each(sys::ignore);
                    sys::set_mask(blocked);
                    Ok(())
                });
                run = run.env("LC_ALL", "C");
                // Some of them do not end when SIGCHLD is ignored: what is needed comes before.
                let mut run = run.start();
                let mut text = String::new();
                while !text.contains("SigCgt") {
                    text += &run.line().unwrap();
                    text += "\n";
                }
                ["SigBlk", "SigIgn", "SigCgt"].map(|key| (key, mask(&text, key)))
            };
            let (plain, under) = (seen(Launch::plain()), seen(Launch::of(init)));
            assert_eq!(plain[0].1, blocked & !(bit(libc::SIGKILL) | bit(libc::SIGSTOP)));
            for ((key, plain), (_, under)) in plain.into_iter().zip(under) {
                for signal in sys::catchable().filter(|n| (plain ^ under) & bit(*n) != 0) {
                    changed.insert((key, under & bit(signal) != 0, signal));
                }
            }
        }
        let words = |key, more, word: &str| {
            let signals: Vec<i32> =
                changed.iter().filter(|(k, m, _)| (*k, *m) == (key, more)).map(|(.., signal)| *signal).collect();
            match signals.len() {
                0 => None,
                31.. => {
                    let others: Vec<i32> = sys::catchable().filter(|n| !signals.contains(n)).collect();
                    Some(format!("{word} all but {}", sys::names(&others)))
                }
                _ => Some(format!("{word} {}", sys::names(&signals))),
            }
        };
        let all = [
            words("SigBlk", true, "blocked"),
            words("SigBlk", false, "unblocked"),
            words("SigIgn", true, "ignored"),
            words("SigIgn", false, "no longer ignored"),
            words("SigCgt", true, "caught"),
        ];
        let all: Vec<String> = all.into_iter().flatten().collect();
        if all.is_empty() { "as given".into() } else { all.join("; ") }
    }

    /// 2 MiB of arguments, with empty ones and bytes that are no text.
    fn two_mib_of_arguments(init) {
        let mut arguments: Vec<OsString> = role("arguments", &["", "-x", "--", "--help", "", "  "]);
        arguments.push(OsString::from_vec((1..=255).collect()));
        // One argument is never longer than 128 KiB.
        arguments.extend((0..20).map(|_| "y".repeat(100_000).into()));
        arguments.extend((0..2_000).map(|n| n.to_string().into()));
        let seen = |launch: Launch| {
            let out = sys::memory_file();
            let launch = launch.command(&arguments).stdout(out.try_clone().unwrap());
            let mut run = launch.with(|| sys::set_limit(libc::RLIMIT_STACK, 32 << 20)).start();
            assert_eq!(run.end(), "0");
            written(&out)
        };
        let plain = seen(Launch::plain());
        assert!(plain.len() > 2_000_000);
        if seen(Launch::of(init)) == plain { "byte for byte".into() } else { "changed".into() }
    }

    /// A pipe of the one who starts it: its reader waits for the init's copy, too.
    fn a_pipe_that_command_closes(init) {
        let (reader, writer) = std::io::pipe().unwrap();
        let fd = writer.as_raw_fd();
        // SAFETY: plain numbers.
        let launch = Launch::of(init).role("close", &["107"]).with(move || sys::check(unsafe { libc::dup2(fd, 107) }).map(drop));
        let run = launch.start().ready();
        drop(writer);
        if sys::readable(&reader, NEVER) { return "closed".into() }
        assert!(fs::read_link(format!("/proc/{}/fd/107", run.pid)).is_ok());
        "kept open".into()
    }

    /// It pins the mount that it is on.
    fn its_working_directory(init) {
        let launch = Launch::of(init).role("ready", &[]).with(|| {
            // SAFETY: the path is a constant.
            sys::check(unsafe { libc::chdir(c"/usr/share".as_ptr()) }).map(drop)
        });
        let run = launch.start().ready();
        let left = within(NEVER, || fs::read_link(format!("/proc/{}/cwd", run.pid)).unwrap().ends_with("/"));
        let child = fs::read_link(format!("/proc/{}/cwd", run.child())).unwrap();
        assert!(child.ends_with("usr/share"));
        if left { "left".into() } else { "kept".into() }
    }
}

/// At rest it has stdin, stdout, stderr and the queue of signals.
#[test]
fn its_own_fds() {
    let launch = Launch::of(Init::Outlast).role("ready", &[]).with(|| {
        for fd in [107, 109, 1_000] {
            // SAFETY: plain numbers.
            sys::check(unsafe { libc::dup2(1, fd) })?;
        }
        Ok(())
    });
    let run = launch.start().ready();
    until("it is idle", || run.is_idle());
    let mut fds: Vec<String> = fs::read_dir(format!("/proc/{}/fd", run.pid))
        .unwrap()
        .map(|fd| fs::read_link(fd.unwrap().path()).unwrap().to_str().unwrap().to_string())
        .collect();
    fds.retain(|file| !file.starts_with("pipe:") && !file.starts_with("/memfd:") && file != "/dev/null");
    assert_eq!(fds, ["anon_inode:[signalfd]"]);
    assert_eq!(field(&crate::process::status(run.pid), "Name").as_deref(), Some("outlast"));
    assert_eq!(state(run.pid), 'S');
}

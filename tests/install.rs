//! `outlast install`, with the static binary. Needs root for its mounts.

use pod::outlast;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

/// Installs under the most private umask.
fn install(program: &Path, path: &Path) -> Output {
    let install = "umask 077; exec \"$0\" install \"$1\"";
    Command::new("sh").args(["-c", install]).args([program, path]).output().unwrap()
}

fn succeeds(program: &Path, path: &Path) {
    let output = install(program, path);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

fn assert_installed(path: &Path) {
    assert_eq!(fs::read(path).unwrap(), fs::read(outlast()).unwrap());
    assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o7777, 0o755);
    let version = Command::new(path).arg("--version").output().unwrap();
    assert!(version.stdout.starts_with(b"outlast "));
}

fn names(directory: &Path) -> Vec<String> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn into_a_directory_to_a_file_and_again_by_the_copy_itself() {
    let directory = tempfile::tempdir().unwrap();
    succeeds(&outlast(), directory.path());
    let copy = directory.path().join("outlast");
    assert_installed(&copy);
    succeeds(&copy, &copy);
    succeeds(&copy, directory.path());
    assert_installed(&copy);
    succeeds(&copy, &directory.path().join("other name"));
    assert_installed(&directory.path().join("other name"));
    assert_eq!(names(directory.path()).len(), 2);
}

#[test]
fn over_a_running_copy_and_over_a_half_written_one() {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("outlast");
    succeeds(&outlast(), &copy);
    let mut running = Command::new(&copy).args(["run", "--", "sleep", "1000"]).spawn().unwrap();
    succeeds(&outlast(), &copy);
    assert_installed(&copy);
    running.kill().unwrap();
    running.wait().unwrap();
    fs::write(&copy, "half").unwrap();
    fs::write(directory.path().join("outlast.new"), "left behind").unwrap();
    succeeds(&outlast(), directory.path());
    assert_installed(&copy);
    assert_eq!(names(directory.path()), ["outlast"]);
}

#[test]
fn many_at_one_time_to_one_path() {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("outlast");
    for _ in 0..10 {
        let start = || Command::new(outlast()).arg("install").arg(&copy).spawn().unwrap();
        let installs: Vec<_> = (0..20).map(|_| start()).collect();
        for mut install in installs {
            assert!(install.wait().unwrap().success());
            // Whole at any time, from the first end on.
            assert_installed(&copy);
        }
        assert_eq!(names(directory.path()), ["outlast"]);
        fs::remove_file(&copy).unwrap();
    }
}

#[test]
fn what_cannot_be_is_said_and_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let missing = install(&outlast(), &directory.path().join("missing/outlast"));
    let said = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert_eq!(missing.status.code(), Some(125), "{said}");
    assert!(said.contains("missing/outlast") && said.contains("No such file"), "{said}");
    let pipe = directory.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(install(&outlast(), &pipe).status.code(), Some(125));
    assert_eq!(names(directory.path()), ["pipe"]);
    for (options, word) in [("size=64k", "No space"), ("ro", "Read-only"), ("noexec", "noexec")] {
        // The mount is in a namespace that ends with the shell.
        let script = format!(
            "mount -t tmpfs -o {options} none \"$1\" && \"$0\" install \"$1\"; s=$?; ls -A \"$1\"; exit $s"
        );
        let output = Command::new("unshare")
            .args(["--mount", "sh", "-c", &script])
            .args([&outlast(), directory.path()])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(125), "{options}: {said}");
        assert!(said.contains(word) && said.lines().count() == 1, "{options}: {said}");
        assert!(output.stdout.is_empty(), "{options} left something behind: {output:?}");
    }
}

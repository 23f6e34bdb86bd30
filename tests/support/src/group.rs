//! Control groups, by which containers in one PID namespace are told apart.

use crate::space::await_that;
use std::fs;
use std::path::{Path, PathBuf};

/// A control group, empty. Its processes are to be dying when it is dropped.
#[derive(Debug)]
pub struct Group(PathBuf);

impl Group {
    /// Makes one; a machine on which none can be made fails the test.
    pub fn new(name: &str) -> Self {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        // Of version 2 first; of version 1 only hierarchies in which a group needs nothing more than its directory.
        let simple =
            |mount: &[&str]| mount[2] == "cgroup2" || mount[2] == "cgroup" && !mount[3].contains("cpuset");
        let mut mounts: Vec<_> = mounts.filter(|mount| simple(mount)).collect();
        mounts.sort_by_key(|mount| mount[2] != "cgroup2");
        let name = format!("outlast-test-{}-{name}", std::process::id());
        let mut refused = Vec::new();
        for mount in mounts {
            let path = Path::new(mount[1]).join(&name);
            match fs::create_dir(&path) {
                Ok(()) => return Self(path),
                Err(error) => refused.push(format!("{}: {error}", path.display())),
            }
        }
        panic!("no control group can be made here, which this test needs: {refused:?}");
    }

    /// A command line that begins in the group.
    pub fn command<'a>(&'a self, argv: &[&'a str]) -> Vec<&'a str> {
        let join = ["sh", "-c", "echo 0 >\"$0/cgroup.procs\" && exec \"$@\"", self.0.to_str().unwrap()];
        [&join, argv].concat()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its processes are dying.
        await_that("the end of the control group", || fs::remove_dir(&self.0).is_ok());
    }
}

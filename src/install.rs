//! `outlast install PATH`: copies the program onto a volume that other containers share.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::statvfs::{FsFlags, statvfs};

use crate::exit::Exit;
use crate::log::Log;

/// Whatever the umask: another container's user executes it.
const MODE: u32 = 0o755;
/// How long another install into the same directory is waited for; one takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// Installs the running program as the file PATH, or as `outlast` in the directory PATH.
pub fn install(path: &OsStr, log: &Log) -> Exit {
    let path = Path::new(path);
    let target = if path.is_dir() { path.join("outlast") } else { path.to_path_buf() };
    match copy_to(&target) {
        Ok(()) => {
            log.info("installed", &[("path", &target.display())]);
            Exit::Success
        }
        Err(error) => {
            log.error("cannot install", &[("path", &target.display()), ("error", &error)]);
            Exit::Failure
        }
    }
}

/// The file is there as a whole or not at all: it is renamed into its place, over a running copy too.
fn copy_to(target: &Path) -> io::Result<()> {
    let name = target.file_name().ok_or_else(|| io::Error::other("no file name"))?;
    if fs::metadata(target).is_ok_and(|there| !there.is_file()) {
        return Err(io::Error::other("it is there already, and no regular file"));
    }
    let directory = match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if statvfs(directory)?.flags().contains(FsFlags::ST_NOEXEC) {
        return Err(io::Error::other(format!("{} is mounted noexec", directory.display())));
    }
    let place = File::open(directory)?;
    be_alone(&place)?;
    let mut temporary = name.to_os_string();
    temporary.push(".new");
    let temporary = Temporary(directory.join(temporary));
    // What an earlier attempt left behind, which was killed.
    let _ = fs::remove_file(&temporary.0);
    let mut copy = OpenOptions::new().write(true).create_new(true).mode(MODE).open(&temporary.0)?;
    io::copy(&mut File::open("/proc/self/exe")?, &mut copy)?;
    copy.set_permissions(Permissions::from_mode(MODE))?;
    copy.sync_all()?;
    drop(copy);
    fs::rename(&temporary.0, target)?;
    // The name is as durable as the file, where a directory can be synced.
    let _ = place.sync_all();
    Ok(())
}

/// Two at one time, as two init containers of a Pod, would take each other's temporary file for one left behind. The
/// lock ends with the process; where the file system has none it is done without.
fn be_alone(directory: &File) -> io::Result<()> {
    let start = Instant::now();
    while matches!(directory.try_lock(), Err(TryLockError::WouldBlock)) {
        if start.elapsed() >= PATIENCE {
            return Err(io::Error::other("another install into the same directory does not end"));
        }
        sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Leaves nothing behind; once it is renamed there is nothing to remove.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

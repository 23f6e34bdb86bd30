//! The table in `docs/init.md`, row by row.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

/// The programs that are compared. Debian has tini twice, and the two must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    Tini,
    TiniStatic,
    Dumb,
    Catatonit,
    Outlast,
}

impl Init {
    pub const ALL: [Init; 5] = [Init::Tini, Init::TiniStatic, Init::Dumb, Init::Catatonit, Init::Outlast];

    /// Its column in the table.
    fn column(self) -> usize {
        match self {
            Init::Tini | Init::TiniStatic => 1,
            Init::Dumb => 2,
            Init::Catatonit => 3,
            Init::Outlast => 4,
        }
    }

    /// Whether what the document says was seen of this version; of another one it may not be so.
    fn is_the_documented_version(self) -> bool {
        let (flag, version) = match self {
            Init::Tini | Init::TiniStatic => ("--version", "0.19.0"),
            Init::Dumb => ("-V", "1.2.5"),
            Init::Catatonit => ("-V", "0.1.7"),
            Init::Outlast => return true,
        };
        let said = Command::new(self.path()).arg(flag).output().unwrap();
        String::from_utf8([said.stdout, said.stderr].concat()).unwrap().contains(version)
    }

    pub fn path(self) -> String {
        let path = match self {
            Init::Tini => "/usr/bin/tini".into(),
            Init::TiniStatic => "/usr/bin/tini-static".into(),
            Init::Dumb => "/usr/bin/dumb-init".into(),
            Init::Catatonit => "/usr/bin/catatonit".into(),
            Init::Outlast => format!("{}/target/static/x86_64/outlast", env!("CARGO_MANIFEST_DIR")),
        };
        assert!(
            Path::new(&path).exists(),
            "{path} is missing: scripts/test installs and builds what is needed"
        );
        path
    }
}

/// Tests that each are a row.
macro_rules! rows {
    ($($(#[$doc:meta])* fn $name:ident($init:ident) $body:block)*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            crate::table::row(concat!(module_path!(), "::", stringify!($name)), |$init| $body);
        }
    )*};
}
pub(crate) use rows;

/// Observes every program at once, and compares with the cells of the row that names this test.
pub fn row(test: &str, observe: impl Fn(Init) -> String + Sync) {
    let test = test.trim_start_matches("init::");
    let seen = thread::scope(|scope| {
        let all = Init::ALL.map(|init| {
            scope.spawn({
                let observe = &observe;
                move || observe(init)
            })
        });
        all.map(|one| one.join().unwrap_or_else(|_| "the test itself failed: see above".into()))
    });
    compare(test, &seen);
}

/// As [`row`], one program after the other: for what needs the machine for itself.
pub fn row_in_turn(test: &str, observe: impl Fn(Init) -> String) {
    compare(test.trim_start_matches("init::"), &Init::ALL.map(observe));
}

fn compare(test: &str, seen: &[String; 5]) {
    let claimed = cells(test);
    println!("observed: | {} | `{test}` |", seen.join(" | "));
    let wrong: Vec<String> = Init::ALL
        .iter()
        .zip(seen)
        .filter_map(|(init, seen)| {
            let claimed = claimed.get(init.column()).map_or("", String::as_str);
            // A figure of a race: it is there to be read, and differs each time.
            let figure = claimed.starts_with('~');
            (!figure && init.is_the_documented_version() && claimed != seen)
                .then(|| format!("{init:?} does {seen:?}, docs/init.md says {claimed:?}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{test}:\n{}", wrong.join("\n"));
}

/// The row that names the test, cell by cell.
fn cells(test: &str) -> Vec<String> {
    table()
        .into_iter()
        .find(|row| row.get(5).is_some_and(|cell| *cell == format!("`{test}`")))
        .unwrap_or_default()
}

fn table() -> Vec<Vec<String>> {
    let path = format!("{}/docs/init.md", env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .filter_map(|line| line.strip_prefix("| "))
        .map(|line| line.trim_end_matches(" |").split(" | ").map(|cell| cell.trim().to_string()).collect())
        .collect()
}

/// The programs of this test, as `libtest` knows them.
#[test]
fn every_row_has_its_test() {
    let sources: Vec<(String, String)> = fs::read_dir(format!("{}/tests/init", env!("CARGO_MANIFEST_DIR")))
        .unwrap()
        .map(|file| file.unwrap().path())
        .map(|path| (path.file_stem().unwrap().to_str().unwrap().into(), fs::read_to_string(path).unwrap()))
        .collect();
    let rows = table();
    // Tests stand in backquotes, and have a module.
    let named = rows.iter().flatten().flat_map(|cell| cell.split('`')).filter(|word| word.contains("::"));
    let mut count = 0;
    for name in named {
        let (module, function) = name.split_once("::").unwrap();
        let found =
            sources.iter().any(|(file, text)| file == module && text.contains(&format!("fn {function}(")));
        assert!(found, "docs/init.md names {name}, which is not there");
        count += 1;
    }
    assert!(count > 0, "docs/init.md has no row");
}

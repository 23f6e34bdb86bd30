//! `docs/reliability.md` says what is so: every test that it names is there, every use of `unsafe` and every crate is in
//! its tables.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(file: &str) -> String {
    fs::read_to_string(repository().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// The rows of the table under a heading, cell by cell, without those of its head.
fn table(heading: &str) -> Vec<Vec<String>> {
    let text = read("docs/reliability.md");
    let (_, section) = text.split_once(&format!("\n## {heading}\n")).unwrap();
    let section = section.split_once("\n## ").map_or(section, |(section, _)| section);
    let rows: Vec<Vec<String>> = section
        .lines()
        .filter_map(|line| line.strip_prefix('|')?.strip_suffix('|'))
        .map(|line| line.split('|').map(|cell| cell.trim().to_owned()).collect())
        .collect();
    assert!(rows.len() > 2, "{heading} has no table");
    rows[2..].to_vec()
}

/// What stands between backquotes.
fn names(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// Whether a file has a test of this name: a function that is marked as one, or is in a table of tests.
fn has_test(text: &str, name: &str) -> bool {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let Some(at) = lines.iter().position(|line| line.starts_with(&format!("fn {name}("))) else {
        return text.contains(&format!("def {name}("));
    };
    let in_a_table = ["(init)", "(through)", "(builder)"].iter().any(|argument| lines[at].contains(argument));
    let marks = lines[..at].iter().rev().take_while(|line| line.starts_with('#') || line.starts_with("//"));
    in_a_table || marks.into_iter().any(|line| *line == "#[test]")
}

#[test]
fn every_row_has_a_test_and_every_test_is_there() {
    let mut missing = Vec::new();
    for (heading, column) in [("An attacker in the Pod", 2), ("Kinds of failure", 3)] {
        for row in table(heading) {
            assert_eq!(row.len(), column + 1, "{row:?}");
            // What nobody can prevent is said elsewhere.
            let given_up = row[column - 1].contains("nothing: ") && row[column - 1].contains("](");
            assert!(given_up || names(&row[column]).next().is_some(), "no test: {row:?}");
            for name in names(&row[column]) {
                let (file, function) = name.split_once("::").unwrap_or_else(|| panic!("{name}"));
                if !has_test(&read(file), function) {
                    missing.push(name.to_owned());
                }
            }
        }
    }
    assert_eq!(missing, Vec::<String>::new());
}

#[test]
fn a_name_that_is_no_test_is_missed() {
    let text = "#[test]\n/// Doc.\nfn one() {}\nfn helper() {}\nfn two(init) {}\n";
    assert!(has_test(text, "one") && has_test(text, "two"));
    assert!(!has_test(text, "helper") && !has_test(text, "on") && !has_test(text, "three"));
}

fn sources(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

#[test]
fn every_use_of_unsafe_is_counted() {
    let code = |text: &str| {
        let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let words = |line: &str| {
            line.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| *word == "unsafe").count()
        };
        lines.map(words).sum::<usize>()
    };
    let mut found = BTreeMap::new();
    for path in sources(&repository().join("src")) {
        let name = path.strip_prefix(repository()).unwrap().to_str().unwrap().to_owned();
        found.insert(name, code(&fs::read_to_string(path).unwrap()));
    }
    found.retain(|_, count| *count > 0);
    let said = table("Unsafe code");
    let said = said.iter().map(|row| (names(&row[0]).next().unwrap().to_owned(), row[1].parse().unwrap()));
    assert_eq!(said.collect::<BTreeMap<String, usize>>(), found);
}

/// The crates that are linked into the binary on a machine, and those of them with a build script.
fn crates(machine: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let platform = format!("--filter-platform={machine}-unknown-linux-musl");
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--locked", "--offline", &platform])
        .current_dir(repository())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let list = |value: &Value| value.as_array().unwrap().clone();
    let packages: BTreeMap<String, Value> = list(&metadata["packages"])
        .into_iter()
        .map(|package| (package["id"].as_str().unwrap().to_owned(), package))
        .collect();
    let nodes: BTreeMap<String, Value> = list(&metadata["resolve"]["nodes"])
        .into_iter()
        .map(|node| (node["id"].as_str().unwrap().to_owned(), node))
        .collect();
    let root = packages.iter().find(|(_, package)| package["name"] == "outlast").unwrap().0;
    let mut seen = BTreeSet::from([root.clone()]);
    let mut next = vec![root.clone()];
    while let Some(id) = next.pop() {
        for dependency in list(&nodes[&id]["deps"]) {
            // Neither for tests nor for build scripts.
            let linked = list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
            let id = dependency["pkg"].as_str().unwrap().to_owned();
            if linked && seen.insert(id.clone()) {
                next.push(id);
            }
        }
    }
    seen.remove(root);
    let name = |id: &String| packages[id]["name"].as_str().unwrap().to_owned();
    let has_script = |id: &&String| {
        list(&packages[*id]["targets"]).iter().any(|target| target["kind"][0] == "custom-build")
    };
    (seen.iter().map(name).collect(), seen.iter().filter(has_script).map(name).collect())
}

#[test]
fn every_crate_and_every_build_script_is_said() {
    let rows = table("Supply chain");
    let name = |row: &Vec<String>| names(&row[0]).next().unwrap().to_owned();
    let all: BTreeSet<String> = rows.iter().map(name).collect();
    let with_script = rows.iter().filter(|row| !row[3].is_empty()).map(name).collect();
    for machine in ["x86_64", "aarch64"] {
        assert_eq!((&all, &with_script), (&crates(machine).0, &crates(machine).1), "{machine}");
    }
}

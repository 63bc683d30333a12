//! There and back, without PyTorch: `cli/tests/dcp.rs` tries what that makes of such files.

use super::*;
use crate::checkpoint::manifest::Origin;

fn origin(step: u64) -> Origin {
    Origin {
        plan_hash: "0".into(),
        model: String::new(),
        step,
        seed: 7,
        next_sample: 4 * step,
        global_batch: 4,
        sequence: 8,
        data: None,
        run: None,
    }
}

/// A checkpoint of two states, the first of them in two files, in its folder.
fn checkpoint(folder: &Path) -> Checkpoint {
    let values: Vec<f32> = (0..12).map(|i| 1.0 / (i + 1) as f32).collect();
    let part = |path: &str, lens: &[u64], start: &[u64], shape: &[u64]| Written {
        path: path.into(),
        lens: lens.into(),
        start: start.into(),
        shape: shape.into(),
    };
    let unfinished = Unfinished::folder(folder).unwrap();
    let files = [
        vec![
            part("h.0.weight", &[4, 3], &[0, 0], &[2, 3]),
            part("moment1.h.0.bias", &[3], &[0], &[3]),
        ],
        vec![part("h.0.weight", &[4, 3], &[2, 0], &[2, 3])],
    ];
    let shards = files.into_iter().enumerate().map(|(i, parts)| {
        let bytes: &[u8] = bytemuck::cast_slice(&values[6 * i..]);
        shard::copy(unfinished.path(), i, parts, &|_| Ok(bytes)).unwrap()
    });
    let shards = shards.collect();
    let path = commit(
        folder,
        (1, &Whole::default()),
        &unfinished,
        origin(30),
        shards,
    )
    .unwrap();
    super::super::find(&path).unwrap().checkpoint
}

/// Lengths by path.
type Lens = BTreeMap<String, Vec<u64>>;

fn wanted(of: &Checkpoint) -> Lens {
    let states = of.states();
    states
        .map(|(path, lens)| (path.into(), lens.into()))
        .collect()
}

/// The bytes of the files of a checkpoint.
fn shards(path: &Path) -> Vec<Vec<u8>> {
    let read = |name| std::fs::read(path.join(name)).unwrap();
    ["rank-0.safetensors", "rank-1.safetensors"]
        .map(read)
        .into()
}

#[test]
fn states_are_the_same_to_the_bit_there_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let (state, there) = (dir.path().join("state"), dir.path().join("there"));
    std::fs::create_dir(&state).unwrap();
    let from = checkpoint(&state);
    export(&from, "", &there).unwrap();
    // What is there is not replaced.
    assert!(export(&from, "", &there).is_err());
    let source = Source::open(&there).unwrap();
    assert_eq!(source.step().unwrap(), Some(30));
    let imported = source.import(&wanted(&from), origin(30), &state).unwrap();
    assert!(imported.left_out.is_empty());
    assert_eq!(shards(&imported.path), shards(from.path()));
    assert!(from.path().exists(), "the one before stays");
    let names = |folder: &Path| -> Vec<String> {
        let all = std::fs::read_dir(folder).unwrap();
        let mut all: Vec<String> = all
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        all.sort();
        all
    };
    assert_eq!(names(&there), [".metadata", "__0_0.distcp", "__1_0.distcp"]);
    assert_eq!(names(dir.path()), ["state", "there"], "nothing is left");
}

/// A module that was wrapped or saved under a key has all names behind a prefix.
#[test]
fn names_behind_a_prefix_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let (state, there) = (dir.path().join("state"), dir.path().join("there"));
    std::fs::create_dir(&state).unwrap();
    let from = checkpoint(&state);
    export(&from, "", &there).unwrap();
    let mut source = Source::open(&there).unwrap();
    let tensors = std::mem::take(&mut source.metadata.tensors);
    let renamed = |(name, tensor): (String, Tensor)| match name == STEP {
        true => (name, tensor),
        false => (format!("model.module.{name}"), tensor),
    };
    source.metadata.tensors = tensors.into_iter().map(renamed).collect();
    let other = source.metadata.tensors["model.module.h.0.weight"].clone();
    source.metadata.tensors.insert("head.weight".into(), other);
    let imported = source.import(&wanted(&from), origin(30), &state).unwrap();
    assert_eq!(imported.left_out, ["head.weight"]);
    assert_eq!(shards(&imported.path), shards(from.path()));
    // Where a part of them has it, what is there is said.
    let moved = source
        .metadata
        .tensors
        .remove("model.module.moment1.h.0.bias");
    source
        .metadata
        .tensors
        .insert("bias".into(), moved.unwrap());
    let said = source
        .import(&wanted(&from), origin(30), &state)
        .unwrap_err();
    assert!(
        said.to_string().contains("it has `bias`, `head.weight`"),
        "{said}"
    );
}

/// A target that is full is named, not the file that is copied.
#[test]
fn who_cannot_be_copied_is_told_from_where_it_goes() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut is_source = false;
    let said = copy(&[0; 8][..], 8, &mut Full, &mut is_source).unwrap_err();
    assert!(said.kind() == io::ErrorKind::StorageFull && !is_source);
    let said = copy(&[0; 7][..], 8, &mut io::sink(), &mut is_source).unwrap_err();
    assert!(said.kind() == io::ErrorKind::UnexpectedEof && is_source);
}

#[test]
fn what_is_not_as_the_plan_has_it_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (state, there) = (dir.path().join("state"), dir.path().join("there"));
    std::fs::create_dir(&state).unwrap();
    let from = checkpoint(&state);
    export(&from, "", &there).unwrap();
    let refuse = |change: &dyn Fn(&mut Lens), words: &str| {
        let mut states = wanted(&from);
        change(&mut states);
        let source = Source::open(&there).unwrap();
        let said = source.import(&states, origin(30), &state).unwrap_err();
        assert!(said.to_string().contains(words), "{said}");
    };
    let none = |s: &mut Lens| drop(s.insert("h.1.weight".into(), vec![4, 3]));
    refuse(&none, "no tensor `h.1.weight`");
    let other = |s: &mut Lens| drop(s.insert("h.0.weight".into(), vec![3, 4]));
    refuse(&other, "`h.0.weight` is [4, 3], and has to be [3, 4]");
    // A part is wanted: the rest is left out, and said.
    let mut some = wanted(&from);
    some.remove("h.0.weight");
    let source = Source::open(&there).unwrap();
    let imported = source.import(&some, origin(30), &state).unwrap();
    assert_eq!(imported.left_out, ["h.0.weight"]);
}

#[test]
fn files_that_are_damaged_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let (state, there) = (dir.path().join("state"), dir.path().join("there"));
    std::fs::create_dir(&state).unwrap();
    let from = checkpoint(&state);
    export(&from, "", &there).unwrap();
    let file = there.join("__1_0.distcp");
    let whole = std::fs::read(&file).unwrap();
    let import = || {
        let source = Source::open(&there).unwrap();
        source.import(&wanted(&from), origin(30), &state)
    };
    for n in [0, 10, whole.len() - 1] {
        std::fs::write(&file, &whole[..n]).unwrap();
        let said = import().unwrap_err().to_string();
        assert!(said.contains("__1_0.distcp"), "{said}");
    }
    std::fs::remove_file(&file).unwrap();
    assert!(import().is_err());
    std::fs::write(&file, &whole).unwrap();
    import().unwrap();
    // Nothing but checkpoints is left of those that failed.
    let left = std::fs::read_dir(&state).unwrap();
    let left = left.filter(|e| !e.as_ref().unwrap().path().join("manifest.json").exists());
    assert_eq!(left.count(), 0);
}

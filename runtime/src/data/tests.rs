//! Files in, tokens or errors out; and files of noise.

use super::format::LLM_C_HEADER_BYTES;
use super::*;
use proptest::prelude::*;
use std::path::{Path, PathBuf};

const TEXT: &str = include_str!("../../../examples/data/northanger_abbey_volume_one.txt");
const TOKENIZER: &[u8] = include_bytes!("../../../examples/data/tokenizer.json");

/// A directory with one data file and, perhaps, a tokenizer.
struct Files {
    dir: tempfile::TempDir,
    name: &'static str,
    options: DataOptions,
}

fn files(name: &'static str, bytes: &[u8]) -> Files {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(name), bytes).unwrap();
    let options = DataOptions {
        format: None,
        tokenizer: None,
        vocab: 50_257,
        validation_fraction: 0.0,
        further: 0,
    };
    Files { dir, name, options }
}

impl Files {
    fn vocab(mut self, vocab: u32) -> Self {
        self.options.vocab = vocab;
        self
    }

    fn validation(mut self, fraction: f64) -> Self {
        self.options.validation_fraction = fraction;
        self
    }

    fn format(mut self, format: DataFormat) -> Self {
        self.options.format = Some(format);
        self
    }

    fn tokenizer(mut self, json: &[u8]) -> Self {
        let path = self.dir.path().join("tokenizer.json");
        std::fs::write(&path, json).unwrap();
        self.options.tokenizer = Some(path);
        self
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join(self.name)
    }

    fn open(&self) -> Result<Dataset, DataError> {
        Dataset::open(&self.path(), &self.options)
    }

    fn sample(&self, index: u64, seq: usize) -> Vec<u32> {
        self.open()
            .unwrap()
            .sample(Split::Train, index, seq)
            .unwrap()
    }

    /// The message, without the directory, of the first error of opening, sampling, checking.
    fn error(&self, index: u64, seq: usize) -> String {
        let error = self
            .open()
            .and_then(|data| data.sample(Split::Train, index, seq).map(|_| data))
            .and_then(|data| data.check())
            .unwrap_err();
        error
            .to_string()
            .replace(&format!("{}/", self.dir.path().display()), "")
    }
}

fn u16s(tokens: &[u16]) -> Vec<u8> {
    tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect()
}

fn llm_c(words: [i32; 3], body: &[u8]) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.resize(LLM_C_HEADER_BYTES, 0);
    bytes.extend(body);
    bytes
}

#[test]
fn nanogpt_files_are_bare_u16() {
    let data = files("train.bin", &u16s(&[1, 2, 50_256, 4, 5, 6, 7]));
    assert_eq!(data.sample(0, 3), [1, 2, 50_256, 4]);
    assert_eq!(data.sample(1, 3), [4, 5, 6, 7]);
}

#[test]
fn llm_c_files_tell_their_width() {
    let gpt2 = files("train.bin", &llm_c([20_240_520, 1, 3], &u16s(&[9, 8, 7])));
    assert_eq!(gpt2.sample(0, 2), [9, 8, 7]);

    let body: Vec<u8> = [128_000_u32, 1, 2]
        .iter()
        .flat_map(|t| t.to_le_bytes())
        .collect();
    let llama = files("train.bin", &llm_c([20_240_801, 7, 3], &body)).vocab(128_256);
    assert_eq!(llama.sample(0, 2), [128_000, 1, 2]);
}

#[test]
fn text_without_a_tokenizer_is_bytes() {
    let data = files("text.txt", "h\u{e9}llo".as_bytes()).vocab(256);
    assert_eq!(data.sample(0, 5), [104, 0xc3, 0xa9, 108, 108, 111]);
}

/// The ids that the `tokenizers` Python package gives for the start of the example text.
#[test]
fn text_with_a_tokenizer_is_its_ids() {
    let data = files("text.txt", TEXT.as_bytes())
        .tokenizer(TOKENIZER)
        .vocab(1024);
    let expected = [
        46, 47, 50, 52, 40, 33, 46, 39, 37, 50, 385, 34, 34, 37, 57, 199, 199, 199, 66, 89,
    ];
    assert_eq!(data.sample(0, 19), expected);
    let dataset = data.open().unwrap();
    assert_eq!(dataset.n_tokens(Split::Train), 72_758);
    dataset.check().unwrap();
}

/// A tokenizer file made for fixed-length inputs does not cut or fill the text.
#[test]
fn truncation_and_padding_are_switched_off() {
    let json = String::from_utf8(TOKENIZER.to_vec()).unwrap();
    let truncation =
        r#""truncation":{"direction":"Right","max_length":4,"strategy":"LongestFirst","stride":0}"#;
    let padding = r#""padding":{"strategy":{"Fixed":100000},"direction":"Right","pad_to_multiple_of":null,"pad_id":0,"pad_type_id":0,"pad_token":"<|endoftext|>"}"#;
    let json = json
        .replacen(r#""truncation":null"#, truncation, 1)
        .replacen(r#""padding":null"#, padding, 1);
    assert!(json.contains("max_length") && json.contains("100000"));
    let data = files("text.txt", TEXT.as_bytes())
        .tokenizer(json.as_bytes())
        .vocab(1024);
    assert_eq!(data.open().unwrap().n_tokens(Split::Train), 72_758);
}

#[test]
fn dropout_is_switched_off() {
    let json = String::from_utf8(TOKENIZER.to_vec()).unwrap();
    let json = json.replacen(r#""dropout":null"#, r#""dropout":0.5"#, 1);
    assert!(json.contains("0.5"));
    let data = files("text.txt", TEXT.as_bytes())
        .tokenizer(json.as_bytes())
        .vocab(1024);
    assert_eq!(data.open().unwrap().n_tokens(Split::Train), 72_758);
}

#[test]
fn special_tokens_in_the_text_become_their_ids() {
    let data = files("text.txt", b"No one<|endoftext|>No one")
        .tokenizer(TOKENIZER)
        .vocab(1024);
    let tokens = data.sample(0, 4);
    assert_eq!(tokens, [738, 501, 0, 738, 501]);
}

/// 103 tokens, a tenth for validation: the last floor(10.3) = 10.
#[test]
fn validation_is_the_last_part() {
    let tokens: Vec<u16> = (0..103).collect();
    let data = files("train.bin", &u16s(&tokens))
        .validation(0.1)
        .open()
        .unwrap();
    assert_eq!(data.n_tokens(Split::Train), 93);
    assert_eq!(data.n_tokens(Split::Validation), 10);
    // (93 - 1) / 4 and (10 - 1) / 4.
    assert_eq!(data.n_windows(Split::Train, 4).unwrap(), 23);
    assert_eq!(data.n_windows(Split::Validation, 4).unwrap(), 2);
    assert_eq!(
        data.sample(Split::Train, 22, 4).unwrap(),
        [88, 89, 90, 91, 92]
    );
    assert_eq!(
        data.sample(Split::Validation, 0, 4).unwrap(),
        [93, 94, 95, 96, 97]
    );
    assert_eq!(
        data.sample(Split::Validation, 1, 4).unwrap(),
        [97, 98, 99, 100, 101]
    );
}

/// Only the piece asked for is read: a file of 1 TB, nearly all of it a hole.
#[test]
fn large_files_are_not_read_whole() {
    let data = files("train.bin", &u16s(&[1, 2]));
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(data.path())
        .unwrap();
    if file.set_len(1 << 40).is_err() {
        return; // A file system without sparse files of that size.
    }
    let dataset = data.open().unwrap();
    let windows = dataset.n_windows(Split::Train, 1023).unwrap();
    assert_eq!(windows, ((1 << 39) - 1) / 1023);
    assert_eq!(
        dataset.sample(Split::Train, windows - 1, 1023).unwrap(),
        [0; 1024]
    );
}

#[test]
fn broken_files_are_refused_with_the_place() {
    let bin = |bytes: &[u8]| files("a.bin", bytes);
    let check = |data: Files, expected: &str| assert_eq!(data.error(0, 2), expected);

    check(bin(b""), "a.bin: empty");
    check(files("a.txt", b""), "a.txt: empty");
    check(
        bin(b"abc"),
        "a.bin: truncated: 3 bytes, which end inside a token of 2 bytes",
    );
    check(
        bin(&u16s(&[1, 2])),
        "a.bin: the train split has 2 tokens; one window of sequence length 2 needs 2 + 1",
    );
    check(
        bin(&u16s(&[1, 2, 3, 4, 999])).vocab(999),
        "a.bin: token 999 at position 4 is not below the vocabulary size 999",
    );
    check(files("a.txt", b"abc\xff"), "a.txt: not UTF-8 at byte 3");
    check(files("a.txt", b"abc\xe2\x82"), "a.txt: not UTF-8 at byte 3");
    check(
        files("a.txt", b"abcdef").vocab(101),
        "a.txt: token 101 at position 4 is not below the vocabulary size 101",
    );
    assert_eq!(
        bin(&u16s(&[1, 2, 3])).error(1, 2),
        "a.bin: window 1 asked for; the train split has 1",
    );
}

#[test]
fn broken_headers_are_refused_with_the_field() {
    let body = u16s(&[1, 2, 3]);
    let check = |bytes: Vec<u8>, expected: &str| {
        assert_eq!(
            files("a.bin", &bytes).format(DataFormat::LlmC).error(0, 2),
            expected
        );
    };
    check(
        vec![0; 7],
        "a.bin: truncated: 7 bytes, which end inside the header of 1024 bytes",
    );
    check(
        vec![1; 1023],
        "a.bin: truncated: 1023 bytes, which end inside the header of 1024 bytes",
    );
    check(
        llm_c([1, 1, 3], &body),
        "a.bin: header: the magic number is 1, expected 20240520 or 20240801",
    );
    check(
        llm_c([20_240_520, 7, 3], &body),
        "a.bin: header: the version is 7, expected 1",
    );
    for count in [2, 4, -1, 0, i32::MIN, i32::MAX] {
        let expected =
            format!("a.bin: header: the token count is {count}, expected 3 from the file's length");
        check(llm_c([20_240_520, 1, count], &body), &expected);
    }
    check(
        llm_c([20_240_801, 7, 1], &body),
        "a.bin: truncated: 1030 bytes, which end inside a token of 4 bytes",
    );
    check(llm_c([20_240_520, 1, 0], b""), "a.bin: empty");
}

#[test]
fn files_that_are_none_are_refused() {
    let data = files("a.bin", b"");
    let missing = Dataset::open(&data.path().with_file_name("b.bin"), &data.options).unwrap_err();
    assert!(
        matches!(&missing, DataError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    );
    assert!(
        missing.to_string().contains("b.bin: cannot open: "),
        "{missing}"
    );
    let directory = Dataset::open(data.dir.path(), &data.options).unwrap_err();
    assert!(matches!(directory, DataError::NotAFile { .. }));
}

#[test]
fn a_file_that_shrinks_is_an_error_not_a_panic() {
    let data = files("a.bin", &u16s(&[1; 100]));
    let dataset = data.open().unwrap();
    std::fs::write(data.path(), b"").unwrap();
    assert!(matches!(
        dataset.sample(Split::Train, 5, 4),
        Err(DataError::Io { .. })
    ));
}

#[test]
fn options_are_checked() {
    for fraction in [-0.1, 1.0, f64::NAN, f64::INFINITY] {
        let error = files("a.bin", &u16s(&[1; 9]))
            .validation(fraction)
            .open()
            .unwrap_err();
        assert!(matches!(error, DataError::BadFraction(_)));
    }
    let data = files("a.bin", &u16s(&[1; 9]));
    assert_eq!(data.error(0, 0), "the sequence length is 0");
    assert_eq!(data.vocab(0).error(0, 1), "the vocabulary size is 0");
    let error = files("a.bin", &u16s(&[1; 9]))
        .tokenizer(TOKENIZER)
        .error(0, 1);
    assert_eq!(
        error,
        "a.bin: holds tokens, not text; the tokenizer tokenizer.json has no use"
    );
}

#[test]
fn tokenizers_are_checked() {
    let error = |json: &[u8]| files("a.txt", b"some text").tokenizer(json).error(0, 1);
    assert!(error(b"{}").starts_with("tokenizer.json: not a usable tokenizer: "));
    assert!(error(b"\xff").starts_with("tokenizer.json: not a usable tokenizer: "));
    let mut data = files("a.txt", b"some text");
    data.options.tokenizer = Some(data.dir.path().join("none.json"));
    assert!(data.error(0, 1).starts_with("none.json: cannot read: "));
}

/// Valid JSON, but parts that are odd or contradict each other: refused or used, never a panic.
#[test]
fn contradictory_tokenizers_never_panic() {
    let models = [
        r#"{"type":"Unigram","unk_id":9,"vocab":[["a",-1.0]],"byte_fallback":false}"#,
        r#"{"type":"Unigram","unk_id":null,"vocab":[],"byte_fallback":true}"#,
        r#"{"type":"WordLevel","vocab":{"a":0},"unk_token":"none"}"#,
        r###"{"type":"WordPiece","vocab":{"a":4294967295},"unk_token":"none","continuing_subword_prefix":"##","max_input_chars_per_word":0}"###,
        r#"{"type":"BPE","vocab":{"a":0,"b":1},"merges":["a b"],"unk_token":"c","fuse_unk":true}"#,
        r#"{"type":"BPE","vocab":{"a":0,"aa":0},"merges":["a a"],"dropout":2.0}"#,
        r#"{"type":"BPE","vocab":{"a":0,"aa":1},"merges":["a  a"],"continuing_subword_prefix":"aaa"}"#,
    ];
    let normalizers = [
        "null",
        r#"{"type":"Precompiled","precompiled_charsmap":"AAAA"}"#,
        r#"{"type":"Precompiled","precompiled_charsmap":"/////wAAAAA="}"#,
        r#"{"type":"Replace","pattern":{"String":""},"content":"xy"}"#,
        r#"{"type":"Prepend","prepend":""}"#,
    ];
    let pre_tokenizers = [
        "null",
        r#"{"type":"Split","pattern":{"Regex":"("},"behavior":"Isolated","invert":false}"#,
        r#"{"type":"Split","pattern":{"Regex":""},"behavior":"Removed","invert":true}"#,
        r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"never","split":false}"#,
    ];
    let mut n_used = 0;
    let mut reasons = Vec::new();
    for model in models {
        for normalizer in normalizers {
            for pre_tokenizer in pre_tokenizers {
                let json = format!(
                    r#"{{"version":"1.0","added_tokens":[{{"id":0,"content":"","special":true,"single_word":false,"lstrip":true,"rstrip":true,"normalized":true}}],"normalizer":{normalizer},"pre_tokenizer":{pre_tokenizer},"post_processor":null,"decoder":null,"model":{model}}}"#
                );
                let data = files("a.txt", "a aab \u{e9}\n".as_bytes()).tokenizer(json.as_bytes());
                match data.open() {
                    Ok(_) => n_used += 1,
                    Err(error) => reasons.push(error.to_string()),
                }
                exercise(&data, 1);
            }
        }
    }
    // Some get past the parser; in others the library panics, which is caught.
    assert!(n_used > 0);
    let caught = |reason: &String| reason.contains(": not a usable tokenizer: Precompiled: ");
    assert!(reasons.iter().any(caught), "{reasons:?}");
}

/// A training step sees the same tokens whoever asks, in whatever order.
#[test]
fn batches_are_functions_of_step_and_position() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../examples/data/northanger_abbey_volume_one.txt");
    let options = DataOptions {
        format: None,
        tokenizer: None,
        vocab: 256,
        validation_fraction: 0.1,
        further: 0,
    };
    let data = Dataset::open(&path, &options).unwrap();
    let seq = 64;
    let order = Order::new(data.n_windows(Split::Train, seq).unwrap(), 8, 1).unwrap();
    let sample = |step, position| {
        data.sample(Split::Train, order.window(step, position), seq)
            .unwrap()
    };
    let forward: Vec<_> = (0..8).map(|position| sample(3, position)).collect();
    let mut backward: Vec<_> = (0..8).rev().map(|position| sample(3, position)).collect();
    backward.reverse();
    assert_eq!(forward, backward);
    for (position, tokens) in (0..).zip(&forward) {
        let start = order.window(3, position) as usize * seq;
        let expected = TEXT.as_bytes()[start..=start + seq]
            .iter()
            .map(|byte| u32::from(*byte));
        assert!(tokens.iter().copied().eq(expected));
    }
}

/// Everything that can be asked of a file: errors are fine, panics and wrong tokens are not.
fn exercise(data: &Files, seq: usize) {
    let Ok(dataset) = data.open() else { return };
    for split in [Split::Train, Split::Validation] {
        let windows = dataset.n_windows(split, seq).unwrap_or(0);
        for index in [0, windows.saturating_sub(1), windows, u64::MAX] {
            if let Ok(tokens) = dataset.sample(split, index, seq) {
                assert!(index < windows && tokens.len() == seq + 1);
                assert!(tokens.iter().all(|&token| token < data.options.vocab));
            }
        }
    }
    let _ = dataset.check();
}

/// `bytes` with some of them overwritten, then cut.
fn damage(bytes: &[u8], edits: &[(proptest::sample::Index, u8)], keep: f64) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for (index, byte) in edits {
        let index = index.index(bytes.len());
        bytes[index] = *byte;
    }
    bytes.truncate((bytes.len() as f64 * keep) as usize);
    bytes
}

fn edits() -> impl Strategy<Value = (Vec<(proptest::sample::Index, u8)>, f64)> {
    let edit = (any::<proptest::sample::Index>(), any::<u8>());
    (
        proptest::collection::vec(edit, 0..6),
        prop_oneof![3 => Just(1.0), 1 => 0.0..1.0],
    )
}

proptest! {
    #[test]
    fn noise_never_panics(
        bytes in proptest::collection::vec(any::<u8>(), 0..1100),
        seq in prop_oneof![0usize..40, Just(usize::MAX)],
        vocab in prop_oneof![1u32..300, Just(u32::MAX)],
        fraction in 0.0..1.0,
    ) {
        for format in [None, Some(DataFormat::NanoGpt), Some(DataFormat::LlmC), Some(DataFormat::Text)] {
            let mut data = files("a.bin", &bytes).vocab(vocab).validation(fraction);
            data.options.format = format;
            exercise(&data, seq);
        }
    }

    #[test]
    fn damaged_llm_c_files_never_panic(
        (edits, keep) in edits(),
        head in proptest::array::uniform12(prop_oneof![9 => Just(None), 1 => any::<u8>().prop_map(Some)]),
        seq in 0usize..9,
    ) {
        for mut bytes in [
            llm_c([20_240_520, 1, 20], &[1; 40]),
            llm_c([20_240_801, 7, 20], &[0; 80]),
        ] {
            // The three words in use are hit on purpose; elsewhere damage hits by chance.
            for (byte, new) in bytes.iter_mut().zip(head) {
                *byte = new.unwrap_or(*byte);
            }
            exercise(&files("a.bin", &damage(&bytes, &edits, keep)), seq);
        }
    }

    #[test]
    fn noise_as_text_or_tokenizer_never_panics(
        text in proptest::collection::vec(any::<u8>(), 0..60),
        json in proptest::collection::vec(any::<u8>(), 0..60),
    ) {
        exercise(&files("a.txt", &text).tokenizer(TOKENIZER).vocab(1024), 3);
        exercise(&files("a.txt", b"some text").tokenizer(&json).vocab(1024), 3);
    }

    /// Damage is placed by what matters: the short head of the file as often as its long tables.
    #[test]
    fn damaged_tokenizers_never_panic(
        (edits, keep) in edits(),
        (head_edits, _) in edits(),
        line in "\\PC{0,30}",
    ) {
        let head = damage(&TOKENIZER[..600], &head_edits, 1.0);
        let json = [&head, &TOKENIZER[600..]].concat();
        let data = files("a.txt", line.as_bytes()).tokenizer(&damage(&json, &edits, keep));
        exercise(&data.vocab(1024), 3);
    }
}

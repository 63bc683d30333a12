//! The pickles of PyTorch's checkpoints as plain data.
//!
//! A pickle is a program that may call whatever Python has. Nothing is called here: the machine
//! below knows the instructions that metadata and tensors are made of, and classes only as names of
//! [a short list](Class). What would be a call becomes a node with its arguments, which
//! readers compare with the one form that they understand; any other instruction or name is an error.
//!
//! Values are nodes in one list, and point at each other by number: a memo shares them, so neither
//! depth nor references that meet again cost anything. There are fewer nodes than bytes.

use std::collections::BTreeMap;

/// Most nodes of a pickle: 10 for each of three million chunks.
const MOST_NODES: usize = 1 << 25;
/// The most marks at a time; PyTorch's have a dozen.
const MOST_MARKS: usize = 1 << 16;
/// The fields of an object that are looked at; PyTorch's have a dozen.
const MOST_FIELDS: usize = 64;

/// The place of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At(u32);

/// The names that a pickle may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Metadata,
    Tensor,
    Properties,
    Chunk,
    Bytes,
    MemoryFormat,
    StorageMeta,
    Index,
    StorageInfo,
    Size,
    Layout,
    Path,
    OrderedDict,
    Rebuild,
    /// An element type, as PyTorch names it.
    Type(&'static str),
}

/// Element types, and the storages that tensors of them have.
const TYPES: [(&str, &str); 10] = [
    ("float32", "FloatStorage"),
    ("float64", "DoubleStorage"),
    ("float16", "HalfStorage"),
    ("bfloat16", "BFloat16Storage"),
    ("int64", "LongStorage"),
    ("int32", "IntStorage"),
    ("int16", "ShortStorage"),
    ("int8", "CharStorage"),
    ("uint8", "ByteStorage"),
    ("bool", "BoolStorage"),
];

impl Class {
    fn of(module: &str, name: &str) -> Option<Self> {
        Some(match (module, name) {
            ("torch.distributed.checkpoint.metadata", name) => match name {
                "Metadata" => Class::Metadata,
                "TensorStorageMetadata" => Class::Tensor,
                "TensorProperties" => Class::Properties,
                "ChunkStorageMetadata" => Class::Chunk,
                "BytesStorageMetadata" => Class::Bytes,
                "_MEM_FORMAT_ENCODING" => Class::MemoryFormat,
                "StorageMeta" => Class::StorageMeta,
                "MetadataIndex" => Class::Index,
                _ => return None,
            },
            // Where they were until PyTorch 2.2.
            ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties") => {
                Class::Properties
            }
            ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING") => {
                Class::MemoryFormat
            }
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo") => Class::StorageInfo,
            ("torch.serialization", "_get_layout") => Class::Layout,
            ("torch._utils", "_rebuild_tensor_v2") => Class::Rebuild,
            ("collections", "OrderedDict") => Class::OrderedDict,
            ("pathlib" | "pathlib._local", "PosixPath" | "WindowsPath" | "PurePosixPath") => {
                Class::Path
            }
            ("torch", "Size") => Class::Size,
            ("torch", name) => {
                let is_it = |t: &&(&str, &str)| t.0 == name || t.1 == name;
                Class::Type(TYPES.iter().find(is_it)?.0)
            }
            _ => return None,
        })
    }
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Node {
    None,
    Bool(bool),
    Int(i64),
    Text(String),
    Tuple(Vec<At>),
    List(Vec<At>),
    Dict(Vec<(At, At)>),
    Class(Class),
    /// The call of a class or function, and what the object was given afterwards.
    Made {
        class: Class,
        args: At,
        state: Option<At>,
    },
    /// Something that lies beside the pickle.
    Beside(At),
}

/// The values of a pickle.
#[derive(Debug)]
pub(super) struct Pickle {
    nodes: Vec<Node>,
    root: At,
}

impl Pickle {
    /// Fails, with the byte where it stands, at what is not as above.
    pub fn read(bytes: &[u8]) -> Result<Self, String> {
        let mut machine = Machine {
            bytes,
            at: 0,
            nodes: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: BTreeMap::new(),
        };
        match machine.run() {
            Ok(root) => Ok(Pickle {
                nodes: machine.nodes,
                root,
            }),
            Err(what) => Err(format!("at byte {} of the pickle: {what}", machine.at)),
        }
    }
    /// The value that the pickle is of.
    pub fn root(&self) -> At {
        self.root
    }
    pub fn node(&self, at: At) -> &Node {
        // Places are given out for nodes that are there, and none goes.
        &self.nodes[at.0 as usize]
    }
    pub fn text(&self, at: At) -> Option<&str> {
        match self.node(at) {
            Node::Text(text) => Some(text),
            _ => None,
        }
    }
    pub fn int(&self, at: At) -> Option<i64> {
        match self.node(at) {
            Node::Int(n) => Some(*n),
            _ => None,
        }
    }
    pub fn tuple(&self, at: At) -> Option<&[At]> {
        match self.node(at) {
            Node::Tuple(items) => Some(items),
            _ => None,
        }
    }
    pub fn dict(&self, at: At) -> Option<&[(At, At)]> {
        match self.node(at) {
            Node::Dict(items) => Some(items),
            _ => None,
        }
    }
    /// The arguments of the call of a class, and the object's state.
    pub fn made(&self, at: At, of: Class) -> Option<(&[At], Option<At>)> {
        match self.node(at) {
            Node::Made { class, args, state } if *class == of => Some((self.tuple(*args)?, *state)),
            _ => None,
        }
    }
    /// A field of an object of a class.
    pub fn field(&self, at: At, of: Class, name: &str) -> Option<At> {
        let (_, state) = self.made(at, of)?;
        let mut fields = self.dict(state?)?.iter().take(MOST_FIELDS);
        let found = fields.find(|(key, _)| self.text(*key) == Some(name));
        found.map(|(_, value)| *value)
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    nodes: Vec<Node>,
    stack: Vec<At>,
    /// Heights of the stack that were marked.
    marks: Vec<usize>,
    memo: BTreeMap<u32, At>,
}

type Done<T = ()> = Result<T, String>;

impl Machine<'_> {
    /// The instructions are those of Python's `pickletools`, by their letters there.
    fn run(&mut self) -> Done<At> {
        loop {
            let [code] = self.take()?;
            match code {
                // PROTO and FRAME, which say how the rest is laid out.
                0x80 => {
                    let [version] = self.take()?;
                    if !(2..=5).contains(&version) {
                        return Err(format!("protocol {version}, known are 2 to 5"));
                    }
                }
                0x95 => drop(self.take::<8>()?),
                b'.' => return self.pop(),
                b'N' => self.push(Node::None)?,
                0x88 => self.push(Node::Bool(true))?,
                0x89 => self.push(Node::Bool(false))?,
                b'K' => {
                    let [n] = self.take()?;
                    self.push(Node::Int(n.into()))?;
                }
                b'M' => {
                    let n = u16::from_le_bytes(self.take()?);
                    self.push(Node::Int(n.into()))?;
                }
                b'J' => {
                    let n = i32::from_le_bytes(self.take()?);
                    self.push(Node::Int(n.into()))?;
                }
                0x8a => self.long()?,
                0x8c => {
                    let [n] = self.take()?;
                    self.string(n.into())?;
                }
                b'X' => {
                    let n = u32::from_le_bytes(self.take()?);
                    self.string(n.into())?;
                }
                0x8d => {
                    let n = u64::from_le_bytes(self.take()?);
                    self.string(n)?;
                }
                b')' => self.push(Node::Tuple(Vec::new()))?,
                0x85 => self.tuple_of(1)?,
                0x86 => self.tuple_of(2)?,
                0x87 => self.tuple_of(3)?,
                b't' => {
                    let items = self.marked()?;
                    self.push(Node::Tuple(items))?;
                }
                b']' => self.push(Node::List(Vec::new()))?,
                b'a' => {
                    let item = self.pop()?;
                    self.append(vec![item])?;
                }
                b'e' => {
                    let items = self.marked()?;
                    self.append(items)?;
                }
                b'}' => self.push(Node::Dict(Vec::new()))?,
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.set(&[key, value])?;
                }
                b'u' => {
                    let items = self.marked()?;
                    self.set(&items)?;
                }
                b'(' => {
                    if self.marks.len() >= MOST_MARKS {
                        return Err(format!("more than {MOST_MARKS} values one within another"));
                    }
                    self.marks.push(self.stack.len())
                }
                0x94 => {
                    let top = self.top()?;
                    self.memo.insert(self.memo.len() as u32, top);
                }
                b'q' => {
                    let ([n], top) = (self.take()?, self.top()?);
                    self.memo.insert(n.into(), top);
                }
                b'r' => {
                    let (n, top) = (u32::from_le_bytes(self.take()?), self.top()?);
                    self.memo.insert(n, top);
                }
                b'h' => {
                    let [n] = self.take()?;
                    self.recall(n.into())?;
                }
                b'j' => {
                    let n = u32::from_le_bytes(self.take()?);
                    self.recall(n)?;
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.class(&module, &name)?;
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    let text = |at: At| match &self.nodes[at.0 as usize] {
                        Node::Text(text) => Ok(text.clone()),
                        _ => Err("the name of a class is no text".to_string()),
                    };
                    let (module, name) = (text(module)?, text(name)?);
                    self.class(&module, &name)?;
                }
                // A class or function is called: REDUCE, NEWOBJ.
                b'R' | 0x81 => {
                    let (args, class) = (self.pop()?, self.pop()?);
                    let Node::Class(class) = self.nodes[class.0 as usize] else {
                        return Err("what is called is no class".into());
                    };
                    let state = None;
                    self.push(Node::Made { class, args, state })?;
                }
                b'b' => {
                    let (given, to) = (self.pop()?, self.top()?);
                    match &mut self.nodes[to.0 as usize] {
                        Node::Made { state, .. } if state.is_none() => *state = Some(given),
                        _ => return Err("what is given a state has none, or has one".into()),
                    }
                }
                b'Q' => {
                    let id = self.pop()?;
                    self.push(Node::Beside(id))?;
                }
                other => {
                    return Err(format!(
                        "instruction {other:#04x}, which no checkpoint of tensors needs"
                    ));
                }
            }
        }
    }

    fn bytes(&mut self, n: u64) -> Done<&[u8]> {
        let end = usize::try_from(n).ok().and_then(|n| self.at.checked_add(n));
        let found = end.and_then(|end| Some((end, self.bytes.get(self.at..end)?)));
        let (end, bytes) = found.ok_or("it ends too early")?;
        self.at = end;
        Ok(bytes)
    }
    fn take<const N: usize>(&mut self) -> Done<[u8; N]> {
        let mut taken = [0; N];
        taken.copy_from_slice(self.bytes(N as u64)?);
        Ok(taken)
    }
    fn push(&mut self, node: Node) -> Done {
        if self.nodes.len() >= MOST_NODES {
            return Err(format!("more than {MOST_NODES} values"));
        }
        self.stack.push(At(self.nodes.len() as u32));
        self.nodes.push(node);
        Ok(())
    }
    /// Takes the top, unless a mark is above it: that belongs to whoever takes the mark.
    fn pop(&mut self) -> Done<At> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }
    fn top(&self) -> Done<At> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let top = self.stack.get(floor..).and_then(<[At]>::last);
        top.copied().ok_or_else(|| "a value is missing".into())
    }
    fn marked(&mut self) -> Done<Vec<At>> {
        let mark = self.marks.pop().ok_or("a mark is missing")?;
        Ok(self.stack.split_off(mark.min(self.stack.len())))
    }
    fn tuple_of(&mut self, n: usize) -> Done {
        let floor = self.marks.last().copied().unwrap_or(0);
        let first = self.stack.len().checked_sub(n).filter(|f| *f >= floor);
        let items = self.stack.split_off(first.ok_or("a value is missing")?);
        self.push(Node::Tuple(items))
    }
    /// A list or dict grows where it is.
    fn append(&mut self, mut items: Vec<At>) -> Done {
        let to = self.top()?;
        match &mut self.nodes[to.0 as usize] {
            Node::List(list) => list.append(&mut items),
            _ => return Err("what is appended to is no list".into()),
        }
        Ok(())
    }
    fn set(&mut self, items: &[At]) -> Done {
        let to = self.top()?;
        let Node::Dict(dict) = &mut self.nodes[to.0 as usize] else {
            return Err("what gets an entry is no dictionary".into());
        };
        let (pairs, rest) = items.as_chunks::<2>();
        dict.extend(pairs.iter().map(|&[key, value]| (key, value)));
        match rest.is_empty() {
            true => Ok(()),
            false => Err("a key has no value".into()),
        }
    }
    fn recall(&mut self, n: u32) -> Done {
        let known = self.memo.get(&n).copied();
        self.stack
            .push(known.ok_or("it names a value that is not there")?);
        Ok(())
    }
    /// A number of up to 8 bytes.
    fn long(&mut self) -> Done {
        let [n] = self.take()?;
        if n > 8 {
            return Err(format!("a number of {n} bytes"));
        }
        let little = self.bytes(n.into())?;
        let is_negative = little.last().is_some_and(|b| b & 0x80 != 0);
        let mut all = [if is_negative { 0xff } else { 0 }; 8];
        all[..little.len()].copy_from_slice(little);
        self.push(Node::Int(i64::from_le_bytes(all)))
    }
    fn string(&mut self, n: u64) -> Done {
        let text = std::str::from_utf8(self.bytes(n)?);
        let text = text.map_err(|e| format!("text that is not UTF-8: {e}"))?;
        let text = text.to_string();
        self.push(Node::Text(text))
    }
    fn line(&mut self) -> Done<String> {
        let rest = &self.bytes[self.at..];
        let n = rest.iter().position(|b| *b == b'\n');
        let n = n.ok_or("a name does not end")?;
        let line = String::from_utf8_lossy(&rest[..n]).into_owned();
        self.at += n + 1;
        Ok(line)
    }
    fn class(&mut self, module: &str, name: &str) -> Done {
        match Class::of(module, name) {
            Some(class) => self.push(Node::Class(class)),
            None => {
                let all: String = format!("{module}.{name}").chars().take(200).collect();
                Err(format!(
                    "it names `{}`, which no checkpoint of tensors needs; nothing of it was executed",
                    all.escape_debug()
                ))
            }
        }
    }
}

/// A pickle that is written: no more of the language than metadata need.
#[derive(Debug, Default)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub fn new() -> Self {
        Writer(vec![0x80, 2])
    }
    pub fn end(mut self) -> Vec<u8> {
        self.0.push(b'.');
        self.0
    }
    pub fn text(&mut self, text: &str) {
        self.0.push(b'X');
        self.0.extend((text.len() as u32).to_le_bytes());
        self.0.extend(text.as_bytes());
    }
    pub fn int(&mut self, n: u64) {
        match i32::try_from(n) {
            Ok(n) => {
                self.0.push(b'J');
                self.0.extend(n.to_le_bytes());
            }
            Err(_) => {
                // Nothing that is counted here comes near to the sign.
                let n = i64::try_from(n).unwrap_or(i64::MAX);
                self.0.extend([0x8a, 8]);
                self.0.extend(n.to_le_bytes());
            }
        }
    }
    pub fn none(&mut self) {
        self.0.push(b'N');
    }
    pub fn no(&mut self) {
        self.0.push(0x89);
    }
    pub fn class(&mut self, module: &str, name: &str) {
        self.0.extend(format!("c{module}\n{name}\n").as_bytes());
    }
    pub fn tuple(&mut self, items: impl FnOnce(&mut Self)) {
        self.0.push(b'(');
        items(self);
        self.0.push(b't');
    }
    pub fn ints(&mut self, all: &[u64]) {
        self.tuple(|w| all.iter().for_each(|&n| w.int(n)));
    }
    /// Calls the class that was written before.
    pub fn call(&mut self, args: impl FnOnce(&mut Self)) {
        self.tuple(args);
        self.0.push(b'R');
    }
    pub fn list(&mut self, items: impl FnOnce(&mut Self)) {
        self.0.extend(b"](");
        items(self);
        self.0.push(b'e');
    }
    /// Keys and values in turn.
    pub fn dict(&mut self, items: impl FnOnce(&mut Self)) {
        self.0.extend(b"}(");
        items(self);
        self.0.push(b'u');
    }
    /// An object of a class, and its state.
    pub fn object(&mut self, module: &str, name: &str, state: impl FnOnce(&mut Self)) {
        self.class(module, name);
        self.0.extend(b")\x81");
        state(self);
        self.0.push(b'b');
    }
    /// Something that lies beside the pickle, by the identifier that was written before.
    pub fn beside(&mut self) {
        self.0.push(b'Q');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_run_code_is_refused_by_name() {
        // The usual attack: `os.system("...")`, called as the pickle is loaded.
        let attack = b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R.";
        let said = Pickle::read(attack).unwrap_err();
        assert!(said.contains("`os.system`"), "{said}");
        let stacked = b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.";
        assert!(Pickle::read(stacked).unwrap_err().contains("builtins.eval"));
        // Also under a module that is known.
        let torch = b"\x80\x02ctorch\nload\n.";
        assert!(Pickle::read(torch).unwrap_err().contains("`torch.load`"));
    }

    #[test]
    fn programs_that_make_no_sense_are_refused() {
        let bad: [(&[u8], &str); 10] = [
            (b"", "ends too early"),
            (b"\x80\x09.", "protocol 9"),
            (b"\x80\x02.", "a value is missing"),
            (b"t.", "a mark is missing"),
            (b"N(\x85.", "a value is missing"),
            (b"h\x05.", "not there"),
            (b"X\xff\xff\xff\xffab", "ends too early"),
            (b"\x8a\x09aaaaaaaaa.", "a number of 9 bytes"),
            (b"NN\x81.", "no class"),
            (b"}(NNNu.", "has no value"),
        ];
        for (bytes, words) in bad {
            let said = Pickle::read(bytes).unwrap_err();
            assert!(said.contains(words), "{bytes:?}: {said}");
        }
    }

    #[test]
    fn lists_that_hold_themselves_end() {
        let pickle = Pickle::read(b"]q\0h\0a.").unwrap();
        assert_eq!(*pickle.node(pickle.root()), Node::List(vec![pickle.root()]));
    }

    #[test]
    fn what_is_written_is_read() {
        let mut w = Writer::new();
        w.dict(|w| {
            w.text("n");
            w.ints(&[0, 1 << 20, i32::MAX as u64, 1 << 40]);
        });
        let pickle = Pickle::read(&w.end()).unwrap();
        let [(name, numbers)] = pickle.dict(pickle.root()).unwrap() else {
            panic!("one entry");
        };
        assert_eq!(pickle.text(*name), Some("n"));
        let numbers = pickle.tuple(*numbers).unwrap().iter();
        let numbers: Vec<Option<i64>> = numbers.map(|n| pickle.int(*n)).collect();
        assert_eq!(
            numbers,
            [0, 1 << 20, i64::from(i32::MAX), 1 << 40].map(Some)
        );
    }
}

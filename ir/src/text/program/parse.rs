//! Parsing of what is left when repeats are written out.

use super::{OTHER_SPACES, STATES, TEMPLATES, partials};
use crate::mesh::{Axis, DeviceMesh, LogicalMesh};
use crate::program::{
    Buffer, BufferClass, Program, RoleProgram, Slot, Space, StateBuffer, Stream, Template,
    TemplateKind, Transfer, Turns,
};
use crate::reshard::Pieces;
use crate::schedule::Route;
use crate::text::scan::Scanner;
use crate::text::{MAX_RANK, ParseError, repeat};
use crate::{
    AxisId, BufferId, DType, DimSharding, InstrId, Rank, ShardingSpec, StageId, StreamId,
    TemplateId,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The program that a text describes; see the module header.
pub fn parse(text: &str) -> Result<Program, ParseError> {
    let expanded = repeat::expand(text)?;
    let mut parser = Parser {
        s: Scanner::new(&expanded.text),
        n_transfers: 0,
        awaited: vec![],
    };
    parser.program().map_err(|e| expanded.at_source(e))
}

pub(super) struct Parser<'a> {
    pub(super) s: Scanner<'a>,
    /// Transfers of the program, once they are read.
    pub(super) n_transfers: usize,
    /// Waits of the role's instructions for other slots, with their places in the text; templates
    /// may come later than those who name them.
    pub(super) awaited: Vec<(Range<usize>, TemplateKind, TemplateId, InstrId)>,
}

impl Parser<'_> {
    fn program(&mut self) -> Result<Program, ParseError> {
        self.s.expect_word("program")?;
        self.s.expect("{")?;
        self.s.expect_word("microbatches")?;
        let n_microbatches = self.s.number("the number of microbatches")?;
        self.s.expect_word("of")?;
        let microbatch = self.s.number("the samples of a microbatch")?;
        self.s.expect_word("samples")?;
        let route = match self.s.eat_word("route") {
            true => self.route()?,
            false => Route::default(),
        };
        let (mut meshes, mut by_stage) = (vec![], BTreeMap::new());
        while self.s.eat_word("mesh") {
            let (stage, mesh) = self.mesh()?;
            by_stage.entry(stage).or_insert(meshes.len());
            meshes.push((stage, mesh));
        }
        let mut transfers = vec![];
        while self.s.eat_word("transfer") {
            self.numbered("x", transfers.len())?;
            let value = self.name()?;
            let (dtype, lens) = self.typed()?;
            let end = |p: &mut Self| {
                let start = p.s.token_start();
                let stage = StageId(p.id("stage", "a stage", usize::MAX)?);
                match by_stage.get(&stage) {
                    Some(&mesh) => Ok((stage, p.spec(&meshes[mesh].1, lens.len())?)),
                    None => Err(p
                        .s
                        .error(start..p.s.token_end(), format!("{stage} has no mesh"))),
                }
            };
            let (from, from_spec) = end(self)?;
            self.s.expect_word("to")?;
            let (to, to_spec) = end(self)?;
            transfers.push(Transfer {
                value,
                from,
                to,
                lens,
                dtype,
                from_spec,
                to_spec,
            });
        }
        self.n_transfers = transfers.len();
        let mut roles = Vec::with_capacity(meshes.len());
        for (stage, mesh) in meshes {
            roles.push(self.role(stage, mesh)?);
        }
        self.s.expect("}")?;
        self.s.end()?;
        Ok(Program {
            roles,
            transfers,
            n_microbatches,
            microbatch,
            route,
        })
    }

    /// `v`.
    fn route(&mut self) -> Result<Route, ParseError> {
        let start = self.s.token_start();
        let word = self.s.word("the route of the stages")?;
        let named = Route::ALL.into_iter().find(|r| r.name() == word);
        named.ok_or_else(|| {
            let names = Route::ALL.map(Route::name).join(" and ");
            let end = self.s.token_end();
            self.s
                .error(start..end, format!("this is no route; {names} are"))
        })
    }

    /// `stage0 rank0: x 2, y 4`.
    fn mesh(&mut self) -> Result<(StageId, LogicalMesh), ParseError> {
        let start = self.s.token_start();
        let stage = StageId(self.id("stage", "a stage", usize::MAX)?);
        let first_rank = Rank(self.id("rank", "the first rank", usize::MAX)?);
        let mut axes: Vec<Axis> = vec![];
        if self.s.eat(":") {
            axes = self.commas(|p| {
                let name = p.s.word("the name of an axis")?.to_string();
                Ok(Axis {
                    name,
                    size: p.s.number("the size of the axis")?,
                })
            })?;
        }
        let problem = |what| Err(self.s.error(start..self.s.token_end(), what));
        let names: std::collections::BTreeSet<_> = axes.iter().map(|a| &a.name).collect();
        if names.len() < axes.len() || axes.len() > MAX_RANK || names.contains(&"_".to_string()) {
            return problem(format!(
                "axes need different names, and are {MAX_RANK} at most"
            ));
        }
        let n_devices = axes.iter().try_fold(1u32, |n, a| n.checked_mul(a.size));
        let last = |n: u32| first_rank.0.checked_add(n);
        match n_devices.filter(|n| *n > 0 && last(*n).is_some()) {
            Some(n_devices) => Ok((
                stage,
                LogicalMesh {
                    devices: DeviceMesh {
                        first_rank,
                        n_devices,
                    },
                    axes,
                },
            )),
            None => problem("the mesh has no ranks, or too many".into()),
        }
    }

    fn role(&mut self, stage: StageId, mesh: LogicalMesh) -> Result<RoleProgram, ParseError> {
        self.s.expect_word("role")?;
        self.numbered("stage", stage.index())?;
        self.s.expect("{")?;
        self.s.expect_word("arena")?;
        let arena_bytes = self.s.number("the bytes of the arena")?;
        self.s.expect_word("bytes")?;
        let mut other_arenas = BTreeMap::new();
        while self.s.eat(",") {
            let space = self.s.choice("a memory space", &OTHER_SPACES)?;
            let bytes = self.s.number("the bytes of the arena")?;
            self.s.expect_word("bytes")?;
            other_arenas.insert(space, bytes);
        }
        let streams = match self.s.eat_word("streams") {
            true => self.commas(|p| p.stream(&mesh))?,
            false => vec![],
        };
        let mut turns: Vec<Arc<[u32]>> = vec![];
        while self.s.peek_word().starts_with("turn") {
            self.numbered("turn", turns.len())?;
            let copies = self.commas(|p| p.s.number("the copy that a microbatch takes"))?;
            turns.push(copies.into());
        }
        self.s.expect_word("buffers")?;
        let mut role = RoleProgram {
            stage,
            mesh,
            streams,
            buffers: vec![],
            templates: vec![],
            trace: vec![],
            arena_bytes,
            other_arenas,
            states: vec![],
            loss: None,
            grad_norm: None,
        };
        self.s.expect("{")?;
        while !self.s.eat("}") {
            let buffer = self.described(role.buffers.len(), &role.mesh, &turns)?;
            role.buffers.push(buffer);
        }
        while self.s.eat_word("template") {
            let start = self.s.token_start();
            let (kind, id) = self.template_id()?;
            if id.index() != role.templates.len() {
                let what = format!("the next template has number {}", role.templates.len());
                return Err(self.s.error(start..self.s.token_end(), what));
            }
            let chunk = match self.s.eat_word("chunk") {
                true => self.s.number("the number of the chunk")?,
                false => 0,
            };
            self.s.expect("{")?;
            let mut instructions = vec![];
            while !self.s.eat("}") {
                instructions.push(self.instruction(instructions.len(), &role)?);
            }
            role.templates.push(Template {
                kind,
                chunk,
                instructions,
            });
        }
        for (place, kind, template, instruction) in std::mem::take(&mut self.awaited) {
            let known = role.templates.get(template.index());
            let known = known.filter(|t| t.kind == kind);
            if known.is_none_or(|t| instruction.index() >= t.instructions.len()) {
                let what = format!("the role has no such template with an {instruction}");
                return Err(self.s.error(place, what));
            }
        }
        self.s.expect_word("trace")?;
        self.s.expect("{")?;
        while !self.s.eat("}") {
            let start = self.s.token_start();
            let (kind, template) = self.template_id()?;
            if role.templates.get(template.index()).map(|t| t.kind) != Some(kind) {
                let what = "the role has no such template".into();
                return Err(self.s.error(start..self.s.token_end(), what));
            }
            let microbatch = match self.s.eat(":") {
                true => Some(self.s.number("the microbatch")?),
                false => None,
            };
            role.trace.push(Slot {
                template,
                microbatch,
            });
        }
        while self.s.eat_word("state") {
            let path = self.name()?;
            let state = self.s.choice("what the state is", &STATES)?;
            self.s.expect_word("of")?;
            let param = self.name()?;
            self.s.expect_word("in")?;
            let buffer = self.buffer(&role)?;
            role.states.push(StateBuffer {
                path,
                param,
                role: state,
                buffer,
            });
        }
        if self.s.eat_word("loss") {
            role.loss = Some(self.buffer(&role)?);
        }
        if self.s.eat_word("grad_norm") {
            role.grad_norm = Some(self.buffer(&role)?);
        }
        self.s.expect("}")?;
        Ok(role)
    }

    /// `4 pieces of 3 along dim 1`, of a tensor of `rank` dims.
    fn pieces(&mut self, rank: usize) -> Result<Pieces, ParseError> {
        let n = self.s.number("the number of pieces")?;
        self.s.expect_word("pieces")?;
        self.s.expect_word("of")?;
        let len = self.s.number("the length of a piece")?;
        self.s.expect_word("along")?;
        self.s.expect_word("dim")?;
        let start = self.s.token_start();
        let dim: usize = self.s.number("a dim")?;
        if dim >= rank {
            let what = format!("the tensor has {rank} dims");
            return Err(self.s.error(start..self.s.token_end(), what));
        }
        Ok(Pieces { dim, n, len })
    }

    /// A line of `buffers`.
    fn described(
        &mut self,
        id: usize,
        mesh: &LogicalMesh,
        turns: &[Arc<[u32]>],
    ) -> Result<Buffer, ParseError> {
        self.numbered("buf", id)?;
        let name = self.name()?;
        let (dtype, lens) = self.typed()?;
        let spec = self.spec(mesh, lens.len())?;
        let classes = ["persistent", "step", "transient", "microbatch"].map(|c| (c, c));
        let class = match self.s.choice("the class of a buffer", &classes)? {
            "persistent" => BufferClass::Persistent,
            "step" => BufferClass::Step,
            "transient" => BufferClass::Transient,
            _ => {
                self.s.expect("*")?;
                BufferClass::PerMicrobatch {
                    slots: self.s.number("the number of copies")?,
                }
            }
        };
        let turns = match self.s.eat_word("row") {
            true => {
                let row = self.s.number("the number of the row")?;
                self.s.expect_word("by")?;
                let turn = self.id("turn", "the turns of the microbatches", turns.len())?;
                let copies = Arc::clone(&turns[turn as usize]);
                Some(Turns { row, copies })
            }
            false => None,
        };
        let space = match self.s.peek() {
            Some('@') => Space::Device,
            _ => self.s.choice("a memory space", &OTHER_SPACES)?,
        };
        self.s.expect("@")?;
        let offset = self.s.number("the offset in the arena")?;
        let bytes = self.s.number("the bytes of a copy")?;
        self.s.expect_word("bytes")?;
        let pieces = match self.s.eat_word("in") {
            true => Some(self.pieces(lens.len())?),
            false => None,
        };
        Ok(Buffer {
            name,
            dtype,
            lens,
            spec,
            pieces,
            class,
            turns,
            space,
            offset,
            bytes,
        })
    }

    /// `F1`: kind and number.
    pub(super) fn template_id(&mut self) -> Result<(TemplateKind, TemplateId), ParseError> {
        let word = self.s.peek_word();
        let letters = word.trim_end_matches(|c: char| c.is_ascii_digit());
        match TEMPLATES.iter().find(|(_, name)| *name == letters) {
            Some(&(kind, _)) => {
                let id = self.id(letters, "a template", usize::MAX)?;
                Ok((kind, TemplateId(id)))
            }
            None => Err(self
                .s
                .error_here("expected a template, such as `F1`".into())),
        }
    }

    /// `f32[2,8]`.
    fn typed(&mut self) -> Result<(DType, Vec<u64>), ParseError> {
        let dtype = self.s.dtype()?;
        let start = self.s.token_start();
        self.s.expect("[")?;
        let lens = self.s.list("]", |s| s.number("a length"))?;
        if lens.len() > MAX_RANK {
            let what = format!("more than {MAX_RANK} dims");
            return Err(self.s.error(start..self.s.token_end(), what));
        }
        Ok((dtype, lens))
    }

    /// A spec as `ShardingSpec::display` writes it.
    fn spec(&mut self, mesh: &LogicalMesh, rank: usize) -> Result<ShardingSpec, ParseError> {
        let start = self.s.token_start();
        self.s.expect("[")?;
        let mut spec = ShardingSpec::replicated(0);
        while !self.s.eat("]") {
            if !spec.dims.is_empty() {
                self.s.expect(",")?;
            }
            if self.s.eat_word("_") {
                spec.dims.push(DimSharding::whole());
            } else {
                let axes = self.axes(mesh)?;
                let unit = match self.s.eat("/") {
                    true => self.s.number("the unit")?,
                    false => 1,
                };
                let turns = match self.s.eat(">") {
                    true => self.s.number("how many places")?,
                    false => 0,
                };
                spec.dims.push(DimSharding {
                    axes: axes.into(),
                    unit,
                    turns,
                });
            }
        }
        if self.s.eat_word("partial") {
            self.s.expect("(")?;
            let partial = self.commas(|p| {
                let axis = p.axis(mesh)?;
                p.s.expect(":")?;
                Ok((axis, p.s.choice("the reduction", &partials())?))
            })?;
            spec.partial = partial.into_iter().collect();
            self.s.expect(")")?;
        }
        let mut problems = spec.problems(mesh);
        if spec.dims.len() != rank {
            problems.push(format!("{} dims of a tensor of {rank}", spec.dims.len()));
        }
        match problems.is_empty() {
            true => Ok(spec),
            false => Err(self.s.error(start..self.s.token_end(), problems.join("; "))),
        }
    }

    fn axis(&mut self, mesh: &LogicalMesh) -> Result<AxisId, ParseError> {
        let axes: Vec<(AxisId, &str)> = mesh.axis_ids().map(|a| (a, mesh.name(a))).collect();
        self.s.choice("an axis of the mesh", &axes)
    }
    /// `x+y`.
    pub(super) fn axes(&mut self, mesh: &LogicalMesh) -> Result<Vec<AxisId>, ParseError> {
        let mut axes = vec![self.axis(mesh)?];
        while self.s.eat("+") {
            axes.push(self.axis(mesh)?);
        }
        Ok(axes)
    }
    /// A stream by its name.
    fn stream(&mut self, mesh: &LogicalMesh) -> Result<Stream, ParseError> {
        let words = ["kernels", "collectives", "world", "transfers", "copies"].map(|w| (w, w));
        Ok(match self.s.choice("a stream", &words)? {
            "kernels" => Stream::Kernels,
            "world" => Stream::World,
            "transfers" => Stream::Transfers,
            "copies" => {
                let spaces = Space::ALL.map(|s| (s, s.name()));
                let from = self.s.choice("a memory space", &spaces)?;
                self.s.expect_word("to")?;
                let to = self.s.choice("a memory space", &spaces)?;
                Stream::Copies { from, to }
            }
            _ => {
                self.s.expect_word("over")?;
                let axes = self.axes(mesh)?;
                Stream::Communicator { axes }
            }
        })
    }
    /// A stream that the role declares.
    pub(super) fn stream_of(&mut self, role: &RoleProgram) -> Result<StreamId, ParseError> {
        let start = self.s.token_start();
        let stream = self.stream(&role.mesh)?;
        match role.streams.iter().position(|s| *s == stream) {
            Some(at) => Ok(StreamId::new(at)),
            None => {
                let what = format!("the role has no stream of {}", stream.name(&role.mesh));
                let mut error = self.s.error(start..self.s.token_end(), what);
                error.help = Some("name it in the `streams` of the role".into());
                Err(error)
            }
        }
    }
    pub(super) fn buffer(&mut self, role: &RoleProgram) -> Result<BufferId, ParseError> {
        Ok(BufferId(self.id(
            "buf",
            "a buffer of the role",
            role.buffers.len(),
        )?))
    }
    /// A path, or a string in quotes.
    pub(super) fn name(&mut self) -> Result<String, ParseError> {
        match self.s.peek() {
            Some('"') => self.s.string(),
            _ => Ok(self.s.path(false)?.to_string()),
        }
    }
    /// An id below `end`, as `buf3`.
    pub(super) fn id(&mut self, prefix: &str, what: &str, end: usize) -> Result<u32, ParseError> {
        let word = self.s.peek_word();
        let id = word.strip_prefix(prefix).and_then(|n| n.parse().ok());
        match id.filter(|n: &u32| (*n as usize) < end && self.s.eat_word(word)) {
            Some(id) => Ok(id),
            None => Err(self
                .s
                .expected(&format!("{what}, `{prefix}` and a number below {end}"))),
        }
    }
    /// The id of what comes next.
    pub(super) fn numbered(&mut self, prefix: &str, next: usize) -> Result<(), ParseError> {
        self.s.expect_word(&format!("{prefix}{next}"))
    }
    pub(super) fn commas<T>(
        &mut self,
        mut item: impl FnMut(&mut Self) -> Result<T, ParseError>,
    ) -> Result<Vec<T>, ParseError> {
        let mut items = vec![item(self)?];
        while self.s.eat(",") {
            items.push(item(self)?);
        }
        Ok(items)
    }
}

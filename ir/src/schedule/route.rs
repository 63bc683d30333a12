//! Which meshes the stages of a pipeline follow each other on.
//!
//! With `p` meshes, stage `k` is chunk `k / p` of its mesh. What differs is where the pipeline
//! goes from the last mesh:
//!
//! ```text
//! ring   mesh 0 1 2 3    V      mesh 0 1 2 3
//! chunk 0     0 1 2 3    chunk 0     0 1 2 3
//! chunk 1     4 5 6 7    chunk 1     7 6 5 4
//! chunk 2     8 9 . .    chunk 2     8 9 . .
//! ```
//!
//! Around a ring every mesh gives to the next one. In a V the last mesh has two stages in a row,
//! between which nothing is sent, and mesh 0 has the pipeline's first stage and its last.

/// Where the pipeline goes from the last mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Route {
    /// To the first mesh: stage `k` is on mesh `k mod p` (Narayanan et al. 2021).
    #[default]
    Ring,
    /// Back over the same meshes: every other chunk lies in reverse (Qi et al. 2024).
    V,
}

impl Route {
    /// Both of them.
    pub const ALL: [Route; 2] = [Route::Ring, Route::V];

    /// A word for text forms.
    pub fn name(self) -> &'static str {
        match self {
            Route::Ring => "ring",
            Route::V => "v",
        }
    }

    /// The mesh of stage `stage`, of `n_meshes`.
    pub fn mesh_of(self, stage: usize, n_meshes: usize) -> usize {
        let p = n_meshes.max(1);
        self.turned(stage / p, stage % p, p)
    }

    /// The stage that is chunk `chunk` of mesh `mesh`, which is one of `n_meshes`.
    pub fn stage_of(self, mesh: usize, chunk: usize, n_meshes: usize) -> usize {
        let p = n_meshes.max(1);
        chunk * p + self.turned(chunk, mesh, p)
    }

    /// The stages of mesh `mesh`, of `n_stages` on `n_meshes` meshes, ascending.
    pub fn stages_of(
        self,
        mesh: usize,
        n_meshes: usize,
        n_stages: usize,
    ) -> impl Iterator<Item = usize> {
        let chunks = 0..n_stages.div_ceil(n_meshes.max(1));
        let stages = chunks.map(move |chunk| self.stage_of(mesh, chunk, n_meshes));
        stages.filter(move |&stage| stage < n_stages)
    }

    /// The mesh at a place of a chunk's row, and the place of a mesh.
    fn turned(self, chunk: usize, at: usize, n_meshes: usize) -> usize {
        match self {
            Route::V if chunk % 2 == 1 => n_meshes - 1 - at,
            _ => at,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_in_rows() {
        let rows = |route: Route| -> Vec<Vec<usize>> {
            let mesh = |mesh| route.stages_of(mesh, 4, 10).collect();
            (0..4).map(mesh).collect()
        };
        assert_eq!(
            rows(Route::Ring),
            [vec![0, 4, 8], vec![1, 5, 9], vec![2, 6], vec![3, 7]]
        );
        assert_eq!(
            rows(Route::V),
            [vec![0, 7, 8], vec![1, 6, 9], vec![2, 5], vec![3, 4]]
        );
    }

    #[test]
    fn every_stage_is_on_one_mesh() {
        for route in Route::ALL {
            for (p, v) in [(1, 1), (1, 3), (2, 2), (5, 4)] {
                for stage in 0..p * v {
                    let mesh = route.mesh_of(stage, p);
                    assert_eq!(route.stage_of(mesh, stage / p, p), stage);
                    let on = |i: &usize| route.stages_of(*i, p, p * v).any(|k| k == stage);
                    assert_eq!((0..p).filter(on).collect::<Vec<_>>(), [mesh]);
                }
            }
        }
    }
}

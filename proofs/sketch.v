(** What a fixed linear sketch of the keys cannot see.

    Over any field, by MathComp's matrices; keys are columns, a page of keys is a matrix. *)
From mathcomp Require Import all_ssreflect all_algebra.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.
Import GRing.Theory.
Local Open Scope ring_scope.

Section Sketch.
Variables (F : fieldType) (m D : nat) (S : 'M[F]_(m, D)).

(** m equations in D > m unknowns have a solution other than 0. *)
Lemma kernel_vector : (m < D)%N -> exists2 u : 'cV[F]_D, u != 0 & S *m u = 0.
Proof.
move=> mD; have [v vker v0] : exists2 v : 'rV[F]_D, (v <= kermx S^T)%MS & v != 0.
  apply/rowV0Pn; rewrite kermx_eq0 /row_free; apply/negP => /eqP rankS.
  by have := rank_leq_col S^T; rewrite rankS leqNgt mD.
exists v^T; first by rewrite -(inj_eq trmx_inj) trmxK trmx0.
by apply: trmx_inj; rewrite trmx_mul trmxK trmx0; apply/sub_kermxP.
Qed.

(** A vector other than 0 has a query that meets it. *)
Lemma meeting_query (u : 'cV[F]_D) : u != 0 -> exists q : 'rV[F]_D, q *m u = 1.
Proof.
case/cV0Pn=> i ui0; exists ((u i 0)^-1 *: delta_mx 0 i).
rewrite -scalemxAl -rowE; apply/matrixP => a b; rewrite !ord1 !mxE.
by rewrite mulVf // eqxx.
Qed.

(** For every linear sketch S of width m < D there is a direction u that S does not see:
    the sketch of a key, and of a page of keys, stays as it is when the keys move along u, each by an
    amount of its own. So does every sketched score, where a sketched score is anything at all that is
    computed from the sketch (and from the query: let [score] be its function for one query).
    Yet there is a query whose true score takes every value along the way. *)
Theorem blindness :
  (m < D)%N ->
  exists u : 'cV[F]_D,
    [/\ u != 0,
        S *m u = 0,
        forall (k : 'cV[F]_D) (t : F), S *m (k + t *: u) = S *m k,
        forall (T : Type) (P : nat) (score : 'M[F]_(m, P) -> T) (K : 'M[F]_(D, P)) (t : 'rV[F]_P),
          score (S *m (K + u *m t)) = score (S *m K)
      & exists q : 'rV[F]_D, forall k t, q *m (k + t *: u) = q *m k + t%:M].
Proof.
move=> mD; have [u u0 Su] := kernel_vector mD; exists u.
split=> // [k t | T P score K t |].
- by rewrite mulmxDr -scalemxAr Su scaler0 addr0.
- by rewrite mulmxDr mulmxA Su mul0mx addr0.
have [q qu] := meeting_query u0; exists q => k t.
by rewrite mulmxDr -scalemxAr qu scalemx1.
Qed.

End Sketch.
